import pytest
import torch
from diffusers import QwenImageTransformer2DModel as Reference

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.shard import shard_of
from sglang.multimodal_gen.runtime.layers.tensor_parallel import PlannedModel, plan_of
from sglang.multimodal_gen.runtime.models.dits.qwen_image import QwenImageTransformer2DModel
from sglang.multimodal_gen.runtime.verify.tiny_weights import fill_with_noise

CONFIG = {
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 40,
    "axes_dims_rope": (4, 6, 6),
}
IMAGE, REFERENCES, TEXT = (5, 6), ((4, 7), (3, 2)), 9


def models(zero_cond_t=False, dtype=torch.float32):
    reference = Reference(**CONFIG, zero_cond_t=zero_cond_t).eval().requires_grad_(False)
    fill_with_noise(reference, 3, {r"norm_(added_)?[qk]\.": 1.6, r"to_(add_)?out\b": 2.0})
    own = QwenImageTransformer2DModel(**CONFIG, zero_cond_t=zero_cond_t).requires_grad_(False)
    own.load_state_dict(reference.state_dict())
    return own.to(dtype), torch.nn.Module.to(reference, dtype)  # the library's own `to` warns


def inputs(references=REFERENCES, mask=False, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    tokens = sum(height * width for height, width in (IMAGE, *references))
    arguments = {
        "hidden_states": torch.randn(2, tokens, 64, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(2, TEXT, 40, generator=generator).to(dtype),
        "timestep": torch.tensor([0.3, 0.743626]).to(dtype),
    }
    if mask:
        lengths = torch.tensor([TEXT, TEXT - 4])
        arguments["encoder_hidden_states_mask"] = torch.arange(TEXT) < lengths[:, None]
    return arguments


def run_reference(reference, arguments, references=REFERENCES):
    shapes = [[(1, *grid) for grid in (IMAGE, *references)]] * 2
    out = reference(**arguments, img_shapes=shapes, return_dict=False)[0]
    return out[:, : IMAGE[0] * IMAGE[1]]


def run(own, arguments, references=REFERENCES, image=IMAGE):
    rotary = own.rotary_embedding(TEXT, image, references)
    return own(**arguments, rotary=rotary)


def relative(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


@pytest.mark.parametrize("zero_cond_t", [False, True], ids=["", "zero_cond_t"])
@pytest.mark.parametrize("references", [(), REFERENCES], ids=["alone", "references"])
@pytest.mark.parametrize("mask", [False, True], ids=["", "mask"])
def test_one_forward_equals_the_reference(zero_cond_t, references, mask):
    own, reference = models(zero_cond_t)
    arguments = inputs(references, mask)
    off = relative(run(own, arguments, references), run_reference(reference, arguments, references))
    print(off)
    assert off < 1e-6


@pytest.mark.parametrize("zero_cond_t", [False, True], ids=["", "zero_cond_t"])
def test_half_precision_is_as_near_as_its_rounding(zero_cond_t):
    (own, reference), (_, exact) = models(zero_cond_t, torch.bfloat16), models(zero_cond_t)
    arguments = inputs(mask=True, dtype=torch.bfloat16)
    theirs = run_reference(reference, arguments)
    wide = {k: v.float() if v.is_floating_point() else v for k, v in arguments.items()}
    truth = run_reference(exact, wide)
    ours, off = run(own, arguments), relative(run(own, arguments), theirs)
    print(off, relative(ours, truth), relative(theirs, truth))
    assert relative(ours, truth) < 1.2 * relative(theirs, truth)
    assert off < 3e-2


def test_every_input_matters():
    own, _ = models(zero_cond_t=True)
    arguments = inputs()
    plain = run(own, arguments)
    for name, value in arguments.items():
        # Another one's: of the text the network norms the scale away.
        assert relative(run(own, {**arguments, name: value.roll(1, 0)}), plain) > 1e-3, name
    changed = arguments["hidden_states"].clone()
    changed[:, -1] *= 2  # a token of the last reference
    assert relative(run(own, {**arguments, "hidden_states": changed}), plain) > 1e-3
    assert relative(run(own, arguments, references=((7, 4), (3, 2))), plain) > 1e-3
    assert relative(run(own, arguments, image=IMAGE[::-1]), plain) > 1e-3


def test_time_zero_for_references_is_heard():
    with_zero, _ = models(zero_cond_t=True)
    without, _ = models(zero_cond_t=False)
    arguments = inputs()
    assert relative(run(with_zero, arguments), run(without, arguments)) > 1e-2


def test_padding_behind_a_mask_is_not_heard():
    own, _ = models()
    arguments = inputs(mask=True)
    other = {**arguments, "encoder_hidden_states": arguments["encoder_hidden_states"].clone()}
    other["encoder_hidden_states"][1, TEXT - 4 :] = 7.0
    plain = run(own, arguments)
    assert relative(run(own, other), plain) < 1e-6
    del other["encoder_hidden_states_mask"]
    assert relative(run(own, other), plain) > 1e-3


def test_positions_far_out_stay_near_the_reference():
    """The reference's angles are float32: at position 2,000 they are off by 1e-4 radians."""
    own, reference = models()
    rotary = own.rotary_embedding(900, (160, 9))
    theirs = reference.pos_embed([[(1, 160, 9)]], device=torch.device("cpu"), max_txt_seq_len=900)
    for ours, their in zip((rotary.image, rotary.text), theirs, strict=True):
        assert (torch.complex(*ours) - their).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"axes_dims_rope": (4, 6, 8)}, "axes_dims_rope"),
        ({"guidance_embeds": True}, "guidance_embeds"),
        ({"use_layer3d_rope": True}, "use_layer3d_rope"),
    ],
)
def test_another_network_is_refused(change, match):
    with pytest.raises(ValueError, match=match):
        QwenImageTransformer2DModel(**{**CONFIG, **change})


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_rank_of_the_published_size_holds_its_part(size):
    with torch.device("meta"):
        model = QwenImageTransformer2DModel()
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert 20.3e9 < whole < 20.5e9
    planned = PlannedModel(model, plan_of(QwenImageTransformer2DModel))
    assert planned.misfit(size) == ""
    assert planned.misfit(5) == "num_attention_heads=24 of QwenImageTransformer2DModel"
    planned.apply(Group("tp", size - 1, tuple(range(size))))
    held = sum(parameter.numel() for parameter in model.parameters())
    kept = sum(p.numel() for p in model.parameters() if shard_of(p) is None)
    assert kept < 0.003 * whole
    assert held - kept == (whole - kept) / size
