"""Denoisers with a plan, split over ranks, say what they say on one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ranks import run_ranks
from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelLayout, ParallelState
from sglang.multimodal_gen.runtime.layers.attention.split_sequence import SequenceContext
from sglang.multimodal_gen.runtime.layers.attention.usp import USPAttention
from sglang.multimodal_gen.runtime.layers.sequence_parallel import (
    _through,
    check_denoiser,
    split_denoiser,
)
from sglang.multimodal_gen.runtime.layers.sequence_plan import (
    RETURN,
    Gather,
    SequencePlan,
    Split,
)
from sglang.multimodal_gen.runtime.models.dits.flux import FluxTransformer2DModel
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, PipelineDefinitionError

from seed_samples.video_toy import VideoToy

FLUX = {
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}
USP = (ParallelLayout(ulysses=4), ParallelLayout(ring=4), ParallelLayout(ulysses=2, ring=2))


class JointToy(nn.Module):
    """Of the Qwen-Image kind: text with padding, whose mask joins the image's keys."""

    def __init__(self, dim=32):
        super().__init__()
        self.image_in, self.text_in = nn.Linear(6, dim), nn.Linear(5, dim)
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(2))
        self.attend = nn.ModuleList(USPAttention() for _ in range(2))

    def forward(self, hidden_states, encoder_hidden_states, encoder_hidden_states_mask=None):
        image, text = self.image_in(hidden_states), self.text_in(encoder_hidden_states)
        mask = None
        if encoder_hidden_states_mask is not None:
            seen = torch.ones(image.shape[:2], dtype=torch.bool)
            mask = torch.cat((encoder_hidden_states_mask, seen), 1)[:, None, None]
        x = torch.cat((text, image), 1)
        for qkv, attend in zip(self.qkv, self.attend, strict=True):
            q, k, v = qkv(x).unflatten(-1, (-1, 3, 8)).unbind(-2)
            x = x + attend(q, k, v, mask).flatten(2)
        return x[:, text.shape[1] :], {"joint": x}


SP_PLAN = SequencePlan(
    streams=("text", "image"),
    edges=(
        Split("hidden_states", "image", dim=1),
        Split("encoder_hidden_states", "text", dim=-2),
        Split("encoder_hidden_states_mask", "text", dim=1),
        Gather(RETURN, "image", dim=1, item=0),
        Gather(RETURN, ("text", "image"), dim=1, item=1),
    ),
)


def flux_inputs(model, height, width, text, batch):
    generator = torch.Generator().manual_seed(height * width)
    return {
        "hidden_states": torch.randn(batch, height * width, 64, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 32, generator=generator),
        "pooled_projections": torch.randn(batch, 24, generator=generator),
        "timestep": torch.rand(batch, generator=generator),
        "rotary": model.rotary_embedding(text, height, width),
    }


def joint_inputs(image, text, batch, masked):
    generator = torch.Generator().manual_seed(image)
    given = {
        "hidden_states": torch.randn(batch, image, 6, generator=generator),
        "encoder_hidden_states": torch.randn(batch, text, 5, generator=generator),
    }
    if masked:
        lengths = torch.tensor([text - 2, text])[:batch]
        given["encoder_hidden_states_mask"] = torch.arange(text) < lengths[:, None]
    return given


def video_inputs(frames, height, width, batch):
    generator = torch.Generator().manual_seed(frames)
    return {
        "hidden_states": torch.randn(batch, 3, frames, height, width, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 5, 12, generator=generator),
        "timestep": torch.rand(batch, generator=generator),
    }


def denoisers():
    """Name -> (class, several inputs): even, odd, fewer tokens than ranks."""
    torch.manual_seed(0)
    flux = FluxTransformer2DModel(**FLUX).requires_grad_(False)
    joint, video = JointToy().requires_grad_(False), VideoToy().requires_grad_(False)
    sizes = ((4, 6, 8, 1), (3, 5, 7, 2), (1, 3, 1, 2))
    return {
        "flux": (flux, [flux_inputs(flux, *size) for size in sizes]),
        "joint": (
            joint,
            [
                joint_inputs(16, 8, 2, False),
                joint_inputs(16, 8, 2, True),
                joint_inputs(15, 7, 2, True),
                joint_inputs(3, 5, 2, True),
            ],
        ),
        "video": (video, [video_inputs(2, 4, 4, 1), video_inputs(3, 6, 10, 2)]),
    }


def flat(output):
    return output if isinstance(output, torch.Tensor) else (output[0], *output[1].values())


def _split_and_whole(_rank, layouts):
    """(layout, model, case) -> how far off, the outputs' bytes, messages sent."""
    results = {}
    for layout in layouts:
        parallel = ParallelState.create(layout, "cpu")
        for name, (model, cases) in denoisers().items():
            expected = [flat(model(**case)) for case in cases]
            assert split_denoiser(model, parallel, "transformer")
            assert split_denoiser(model, parallel, "transformer")  # once is enough
            for index, case in enumerate(cases):
                before = {g: getattr(parallel, g).traffic.copy() for g in ("sp", "ulysses", "ring")}
                found = flat(model(**case))
                sent = {
                    group: dict(getattr(parallel, group).traffic - count)
                    for group, count in before.items()
                }
                pairs = zip(_all(found), _all(expected[index]), strict=True)
                off = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
                results[layout, name, index] = off, [x.numpy().tobytes() for x in _all(found)], sent
    return results


def _all(output):
    return output if isinstance(output, tuple) else (output,)


def check(world_size, *layouts):
    ranks = run_ranks(world_size, _split_and_whole, layouts)
    attention = {"flux": 4, "joint": 2, "video": 2}
    for (layout, name, index), (off, values, sent) in ranks[0].items():
        assert off < 1e-5, f"{layout}, {name} {index}: {off:.1e}"
        assert all(other[layout, name, index][1] == values for other in ranks), "ranks differ"
        calls = attention[name]
        assert sent["ulysses"] == ({"all_to_all": 2 * calls} if layout.ulysses > 1 else {})
        rounds = calls * (layout.ring - 1)
        assert sent["ring"] == ({"exchange": rounds} if rounds else {})
        # The output; of the joint model two, and a mask, once for its two layers.
        masked = name == "joint" and index > 0
        assert sent["sp"] == {"all_gather": {"flux": 1, "joint": 2 + masked, "video": 1}[name]}


def test_two_ranks():
    check(2, ParallelLayout(ulysses=2), ParallelLayout(ring=2))


@pytest.mark.slow
def test_four_ranks():
    check(4, *USP)


def test_the_inputs_matter():
    for name, (model, cases) in denoisers().items():
        for case in cases:
            plain = _all(flat(model(**case)))[0]
            for key, value in case.items():
                if not isinstance(value, torch.Tensor):
                    continue
                changed = ~value if value.dtype == torch.bool else value + 0.5
                moved = _all(flat(model(**{**case, key: changed})))[0]
                assert (moved - plain).norm() > 1e-4 * plain.norm(), (name, key)


def of_two(name="sp"):
    alone = ParallelState.single()
    two = Group(name, 0, (0, 1))
    return ParallelState(
        **{f: getattr(alone, f) for f in ParallelState.__dataclass_fields__}
        | {"sp": two, "ulysses": two}
    )


def test_one_rank_is_left_alone():
    model, cases = denoisers()["flux"]
    expected = model(**cases[0])
    assert not split_denoiser(model, ParallelState.single(), "transformer")
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert not any(m.is_split for m in model.modules() if isinstance(m, USPAttention))
    assert torch.equal(model(**cases[0]), expected)


def test_a_wrong_line_is_found_on_one_rank_too(monkeypatch):
    wrong = SequencePlan(
        ("image",), (Split("hidden", "image", dim=1), Gather(RETURN, "image", dim=1))
    )
    monkeypatch.setitem(globals(), "SP_PLAN", wrong)
    with pytest.raises(PipelineDefinitionError, match="no argument 'hidden'"):
        split_denoiser(JointToy(), ParallelState.single(), "transformer")


def test_a_denoiser_without_a_plan_is_refused_by_name():
    with pytest.raises(
        InvalidArgument, match=r"sp_degree=2: transformer \(Linear\) has no SP_PLAN"
    ):
        split_denoiser(nn.Linear(2, 2), of_two(), "transformer")
    check_denoiser(nn.Linear, {}, ParallelState.single(), "transformer")


def test_heads_that_do_not_divide_are_refused_before_there_is_a_model():
    message = r"ulysses_degree=2: transformer \(FluxTransformer2DModel\) has 5 attention heads"
    with pytest.raises(InvalidArgument, match=message):
        check_denoiser(FluxTransformer2DModel, {"num_attention_heads": 5}, of_two(), "transformer")
    check_denoiser(FluxTransformer2DModel, {}, of_two(), "transformer")  # 24 by default


def through(edge, value, **lengths):
    two = Group("sp", 0, (0, 1))
    context = SequenceContext(sp=two, ulysses=two, ring=Group("ring"))
    for name, length in lengths.items():
        context.shard = context.shard.with_stream(name, length)
    return _through(edge, value, context), context


def test_a_joint_value_tells_the_one_length_that_is_missing():
    joint = Split("rotary", ("text", "image"), dim=0)
    piece, context = through(joint, torch.arange(11), text=4)
    assert piece.tolist() == [0, 1, 4, 5, 6, 7]
    assert context.shard.length("image") == 7
    with pytest.raises(PipelineDefinitionError, match="tells the lengths of text and image"):
        through(joint, torch.arange(11))
    with pytest.raises(PipelineDefinitionError, match="meets 11 tokens, but those streams have 12"):
        through(joint, torch.arange(11), text=4, image=8)


def test_values_of_many_forms():
    edge = Split("x", "text", dim=0)
    x = torch.arange(4)
    assert through(edge, None)[0] is None
    assert through(edge, [x, None])[0][0].tolist() == [0, 1]
    assert through(edge, {"a": (x,)})[0]["a"][0].tolist() == [0, 1]
    with pytest.raises(PipelineDefinitionError, match="meets a str"):
        through(edge, "words")
    with pytest.raises(PipelineDefinitionError, match="meets 3 tokens, but a rank's piece has 2"):
        through(Gather(RETURN, "text", dim=0), torch.arange(3), text=4)
