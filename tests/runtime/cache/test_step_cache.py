"""Blocks left out of a denoiser's call: by its table alone, and for each image by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sglang.multimodal_gen.configs.step_cache_choice import StepCacheChoice
from sglang.multimodal_gen.runtime.cache.block_passage import BlockStands
from sglang.multimodal_gen.runtime.cache.step_cache import StepCacheRun
from sglang.multimodal_gen.runtime.cache.step_cache_plan import (
    CachedBlocks,
    StepCachePlan,
    method_problem,
    step_cache_plan,
)
from sglang.multimodal_gen.runtime.models.dits.flux import FluxTransformer2DModel
from sglang.multimodal_gen.runtime.models.dits.qwen_image import QwenImageTransformer2DModel
from sglang.multimodal_gen.runtime.models.dits.wan import WanTransformer3DModel
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError
from sglang.multimodal_gen.runtime.verify.tiny_weights import fill_with_noise
from thread_ranks import run_threads

STEPS = 4
SMALL = {"attention_head_dim": 8, "num_attention_heads": 2}


def flux():
    model = FluxTransformer2DModel(
        in_channels=6, num_layers=2, num_single_layers=2, joint_attention_dim=5,
        pooled_projection_dim=4, axes_dims_rope=(2, 2, 4), **SMALL,
    )  # fmt: skip
    rotary = model.rotary_embedding(3, 2, 2)

    def kwargs(x_BND, text, time_B):
        return {"hidden_states": x_BND, "encoder_hidden_states": text[:, :, :5], "rotary": rotary,
                "pooled_projections": text[:, 0, :4], "timestep": time_B}  # fmt: skip

    return model, kwargs, (4, 6)


def qwen():
    model = QwenImageTransformer2DModel(
        in_channels=6, out_channels=6, patch_size=1, num_layers=3, joint_attention_dim=5,
        axes_dims_rope=(2, 2, 4), zero_cond_t=True, **SMALL,
    )  # fmt: skip
    rotary = model.rotary_embedding(3, (2, 2), [(1, 2)])

    def kwargs(x_BND, text, time_B):
        mask = torch.ones(text.shape[:2], dtype=torch.bool)
        mask[:, -1] = False
        return {"hidden_states": x_BND, "encoder_hidden_states": text[:, :, :5], "rotary": rotary,
                "encoder_hidden_states_mask": mask, "timestep": time_B}  # fmt: skip

    return model, kwargs, (6, 6)


def wan():
    model = WanTransformer3DModel(
        in_channels=3, out_channels=3, text_dim=5, freq_dim=8, ffn_dim=24, num_layers=3,
        image_dim=5, added_kv_proj_dim=16, **SMALL,
    )  # fmt: skip
    rotary = model.rotary_embedding(1, 4, 4)

    def kwargs(x, text, time_B):
        return {"hidden_states": x, "encoder_hidden_states": text[:, :, :5], "rotary": rotary,
                "encoder_hidden_states_image": text[:, :2, :5],
                "timestep": 1000 * time_B}  # fmt: skip

    return model, kwargs, (3, 1, 4, 4)


FAMILIES = {"flux": flux, "qwen": qwen, "wan": wan}


def opened(family):
    model, kwargs, shape = FAMILIES[family]()
    fill_with_noise(model, seed=1)
    model.requires_grad_(False)
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(2, *shape, generator=draw)
    other = torch.randn(STEPS, *shape, generator=draw)
    text = torch.randn(2, 3, 8, generator=draw)

    def step(index, images):
        x = start.clone()
        x[1] = other[index]  # the second image changes wholly at each step, the first hardly
        x[0] += 1e-3 * index
        time_B = torch.full((len(images),), 1 - 1e-5 * index)
        return kwargs(x[images], text[images], time_B)

    return model, step


def drive(model, step, images, threshold, method="first-block"):
    plan = step_cache_plan(type(model))
    run = StepCacheRun(StepCacheChoice(method, threshold), len(images))
    stands = BlockStands(model, plan)
    made = [run.call(stands, "only", step(index, images)) for index in range(STEPS)]
    return torch.stack(made), run


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("flux", "first-block"),
        ("flux", "teacache"),
        ("qwen", "first-block"),
        ("wan", "first-block"),
    ],
)
def test_each_image_of_a_batch_is_decided_by_itself(family, method):
    model, step = opened(family)
    last = step_cache_plan(type(model)).lists(model)[-1][1][-1]
    rows: list[int] = []
    last.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    plain = torch.stack([model(**step(index, [0, 1])) for index in range(STEPS)])
    rows.clear()
    none, run = drive(model, step, [0, 1], 0.0, method)
    assert torch.equal(none, plain)
    assert run.reused == [0, 0]
    assert rows == [2] * STEPS
    rows.clear()
    limit = 0.45 if method == "teacache" else 0.1
    both, run = drive(model, step, [0, 1], limit, method)
    assert run.reused[0] > run.reused[1]
    assert 1 in rows, "blocks were computed for one image alone"
    assert sum(rows) == 2 * STEPS - sum(run.reused)
    for image in (0, 1):
        alone, by_itself = drive(model, step, [image], limit, method)
        assert by_itself.reused == [run.reused[image]]
        torch.testing.assert_close(both[:, image], alone[:, 0], rtol=1e-4, atol=1e-5)
    assert not torch.equal(both[1:, 0], plain[1:, 0])
    torch.testing.assert_close(both[:, 1], plain[:, 1], rtol=1e-4, atol=1e-5)


def test_the_blocks_are_in_their_places_again_also_after_a_failure():
    model, step = opened("flux")
    blocks = list(model.transformer_blocks)
    stands = BlockStands(model, step_cache_plan(type(model)))
    run = StepCacheRun(StepCacheChoice("first-block", 0.1), 2)
    with pytest.raises(RuntimeError):
        run.call(stands, "only", step(0, [0, 1]) | {"pooled_projections": torch.zeros(2, 9)})
    run.call(stands, "only", step(0, [0, 1]))
    assert list(model.transformer_blocks) == blocks
    assert "forward" not in vars(blocks[0])


def test_branches_and_shapes_do_not_meet():
    model, step = opened("flux")
    stands = BlockStands(model, step_cache_plan(type(model)))
    run = StepCacheRun(StepCacheChoice("first-block", 10.0), 1)
    run.call(stands, "positive", step(0, [0]))
    run.call(stands, "negative", step(0, [0]))
    assert run.reused == [0]
    run.call(stands, "positive", step(1, [0]))
    assert run.reused == [1]
    wider = step(1, [0]) | {"hidden_states": torch.zeros(1, 6, 6),
                            "rotary": model.rotary_embedding(3, 2, 3)}  # fmt: skip
    assert run.call(stands, "positive", wider).shape == (1, 6, 6)
    assert run.reused == [1]


def test_all_ranks_see_the_same_change_and_leave_padding_out():
    """Each rank has half of the tokens: the change is that of the whole."""
    old, new = torch.randn(2, 3, 6, 5)
    new[0] = old[0]
    whole = StepCacheRun(StepCacheChoice("first-block", 0.1), 3).changes(new, old)

    def on_rank(group):
        run = StepCacheRun(StepCacheChoice("first-block", 0.1), 3, group)
        half = slice(3 * group.rank, 3 * group.rank + 3)
        return run.changes(new[:, half], old[:, half]), dict(group.traffic)

    (first, traffic), (second, _) = run_threads(2, on_rank)
    assert first == second
    assert first == pytest.approx(whole)
    assert whole[0] == 0 < whole[1]
    assert traffic == {"all_gather": 1}


class Bare(nn.Module):
    """A denoiser that declares nothing."""


class Wrong(nn.Module):
    STEP_CACHE = StepCachePlan(blocks=(CachedBlocks("blocks", carries=("x", "y")),))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


def test_a_denoiser_that_does_not_declare_what_is_needed_is_refused_by_name():
    assert "Bare has no STEP_CACHE" in (method_problem(Bare, "first-block") or "")
    assert "use first-block" in (method_problem(WanTransformer3DModel, "teacache") or "")
    assert method_problem(WanTransformer3DModel, "first-block") is None
    with pytest.raises(PipelineDefinitionError, match="has no argument 'x'"):
        BlockStands(Wrong(), Wrong.STEP_CACHE)
    elsewhere = StepCachePlan(blocks=(CachedBlocks("layers", carries=("input",)),))
    with pytest.raises(PipelineDefinitionError, match="'layers', which is no ModuleList"):
        BlockStands(Wrong(), elsewhere)
    forgotten = StepCachePlan(
        blocks=tuple(
            CachedBlocks(line.path, line.carries)
            for line in step_cache_plan(FluxTransformer2DModel).blocks
        )
    )
    model, step = opened("flux")
    run = StepCacheRun(StepCacheChoice("first-block", 0.1), 2)
    stands = BlockStands(model, forgotten)
    run.call(stands, "only", step(0, [0, 1]))
    with pytest.raises(PipelineDefinitionError, match="per_image"):
        run.call(stands, "only", step(1, [0, 1]))
