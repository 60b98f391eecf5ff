import pytest

from sglang.multimodal_gen.runtime.layers.lora.adapter_keys import (
    other_adapter_type,
    parse_adapter_key,
)

NAMES = {
    "transformer.blocks.0.q.lora_A.weight": ("transformer", "blocks.0.q", "down", "diffusers"),
    "transformer_2.q.lora_B.weight": ("transformer_2", "q", "up", "diffusers"),
    "transformer.q.lora.up.weight": ("transformer", "q", "up", "diffusers"),
    "unet.q.lora.down.weight": ("transformer", "q", "down", "diffusers"),
    "text_encoder.x.q.lora_linear_layer.down.weight": ("text_encoder", "x.q", "down", "diffusers"),
    "text_encoder_2.x.lora_A.weight": ("text_encoder_2", "x", "down", "diffusers"),
    "base_model.model.b.q.lora_A.default.weight": ("", "b.q", "down", "peft"),
    "base_model.model.transformer.q.lora_B.weight": ("transformer", "q", "up", "peft"),
    "lora_unet_blocks_0_q.lora_down.weight": ("", "blocks_0_q", "down", "kohya"),
    "lora_unet_q.alpha": ("", "q", "alpha", "kohya"),
    "lora_te1_layers_0.lora_up.weight": ("text_encoder", "layers_0", "up", "kohya"),
    "lora_te2_x.alpha": ("text_encoder_2", "x", "alpha", "kohya"),
    "lora_te_x.lora_up.weight": ("text_encoder", "x", "up", "kohya"),
    "diffusion_model.b.0.q.lora_down.weight": ("", "b.0.q", "down", "comfy"),
    "b.0.processor.qkv_lora1.down.weight": (
        "",
        "b.0.processor.qkv_lora1",
        "down",
        "plain",
    ),
    "b.processor.proj_lora.up.weight": ("", "b.processor.proj_lora", "up", "plain"),
    "transformer_blocks.0.q.lora_down.weight": (
        "",
        "transformer_blocks.0.q",
        "down",
        "plain",
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_every_style(name):
    key = parse_adapter_key(name)
    assert (key.component, key.module, key.part, key.style) == NAMES[name]


@pytest.mark.parametrize(
    "name",
    [
        "q.weight",
        "q.diff",
        "q.diff_b",
        "transformer.q.lora_B.bias",
        "q.lora_embedding_A",
        "norm.scale",
    ],
)
def test_names_of_another_kind_are_not_read(name):
    assert parse_adapter_key(name) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lora_unet_q.lokr_w1", "LoKr"),
        ("lora_unet_q.lokr_w2_a", "LoKr"),
        ("lora_unet_q.hada_w1_a", "LoHa"),
        ("lora_unet_q.dora_scale", "DoRA"),
        ("base_model.model.q.lora_magnitude_vector.weight", "DoRA"),
        ("lora_unet_q.lora_mid.weight", "LoCon with a Tucker core"),
        ("lora_unet_q.oft_blocks", "OFT"),
    ],
)
def test_other_methods_are_named(name, kind):
    assert other_adapter_type(["lora_unet_a.lora_down.weight", name]) == kind
    assert other_adapter_type(["lora_unet_a.lora_down.weight"]) is None
