import pytest
import torch
from diffusers import FluxTransformer2DModel as Reference

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.rotary_embedding import Rotary
from sglang.multimodal_gen.runtime.layers.shard import shard_of
from sglang.multimodal_gen.runtime.layers.tensor_parallel import PlannedModel, plan_of
from sglang.multimodal_gen.runtime.models.dits.flux import (
    FluxSingleTransformerBlock,
    FluxTransformer2DModel,
)

CONFIG = {
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}
HEIGHT, WIDTH, TEXT = 4, 6, 5


@pytest.fixture(params=[True, False], ids=["guidance", "no guidance"])
def models(request):
    torch.manual_seed(0)
    reference = Reference(**CONFIG, guidance_embeds=request.param).eval().requires_grad_(False)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    own = FluxTransformer2DModel(**CONFIG, guidance_embeds=request.param).requires_grad_(False)
    own.load_state_dict(reference.state_dict())
    return own, reference


def inputs(own):
    generator = torch.Generator().manual_seed(1)
    arguments = {
        "hidden_states": torch.randn(2, HEIGHT * WIDTH, 64, generator=generator),
        "encoder_hidden_states": torch.randn(2, TEXT, 32, generator=generator),
        "pooled_projections": torch.randn(2, 24, generator=generator),
        "timestep": torch.tensor([0.3, 0.7]),
    }
    if own.guidance_embeds:
        arguments["guidance"] = torch.tensor([3.5, 2.0])
    return arguments


def run_reference(reference, arguments):
    image_ids = torch.zeros(HEIGHT, WIDTH, 3)
    image_ids[..., 1] = torch.arange(HEIGHT)[:, None]
    image_ids[..., 2] = torch.arange(WIDTH)
    return reference(
        **arguments, img_ids=image_ids.flatten(0, 1), txt_ids=torch.zeros(TEXT, 3)
    ).sample


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def test_one_forward_equals_the_reference(models):
    own, reference = models
    arguments = inputs(own)
    out = own(**arguments, rotary=own.rotary_embedding(TEXT, HEIGHT, WIDTH))
    assert relative(out, run_reference(reference, arguments)) < 1e-5


def test_every_input_matters(models):
    own, _ = models
    arguments = inputs(own)
    rotary = own.rotary_embedding(TEXT, HEIGHT, WIDTH)
    plain = own(**arguments, rotary=rotary)
    for name, value in arguments.items():
        changed = own(**{**arguments, name: value * 1.1}, rotary=rotary)
        assert relative(changed, plain) > 1e-3, name
    turned = own.rotary_embedding(TEXT, WIDTH, HEIGHT)
    assert relative(own(**arguments, rotary=turned), plain) > 1e-3


def test_half_precision_rounds_time_and_guidance_as_the_reference_does(models):
    own, reference = models
    own, reference = own.bfloat16(), reference.bfloat16()
    arguments = inputs(own)
    halves = {
        name: value.bfloat16() if value.dim() > 1 else value for name, value in arguments.items()
    }
    out = own(**halves, rotary=own.rotary_embedding(TEXT, HEIGHT, WIDTH))
    # bf16 itself is good for 3e-2 here; a float32 time embedding would be off by far more.
    assert relative(out.float(), run_reference(reference, halves).float()) < 3e-2


def test_axes_that_do_not_fill_a_head_are_refused():
    with pytest.raises(ValueError, match="axes_dims_rope"):
        FluxTransformer2DModel(**{**CONFIG, "axes_dims_rope": (4, 6, 8)})


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_rank_of_the_published_size_holds_its_part(size):
    with torch.device("meta"):
        model = FluxTransformer2DModel(guidance_embeds=True)
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert 11.8e9 < whole < 12.0e9
    planned = PlannedModel(model, plan_of(FluxTransformer2DModel))
    assert planned.misfit(size) == ""
    assert planned.misfit(5) == "num_attention_heads=24 of FluxTransformer2DModel"
    planned.apply(Group("tp", size - 1, tuple(range(size))))
    held = sum(parameter.numel() for parameter in model.parameters())
    kept = sum(p.numel() for p in model.parameters() if shard_of(p) is None)
    assert kept < 0.0055 * whole
    assert held - kept == (whole - kept) / size
    assert held < whole / size + 0.006 * whole


def test_a_single_streams_message_travels_while_its_feed_forward_is_computed(monkeypatch):
    """Attention is begun before the feed-forward's first product, and waited for after it."""
    block = FluxSingleTransformerBlock(32, 8)
    order, begin = [], block.attn.attend.begin

    def noting(*args):
        order.append("begun")
        finish = begin(*args)

        def finished():
            order.append("finished")
            return finish()

        return finished

    monkeypatch.setattr(block.attn.attend, "begin", noting)
    block.proj_mlp.register_forward_hook(lambda *_: order.append("feed-forward"))
    angles = torch.zeros(5, 4)
    block(torch.randn(1, 5, 32), torch.randn(1, 32), Rotary(angles.cos(), angles.sin()))
    assert order == ["begun", "feed-forward", "finished"]
