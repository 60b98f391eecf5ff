"""Qwen2.5-VL: its table on the published sizes, and positions of pictures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.tensor_parallel import PlannedModel, plan_of
from sglang.multimodal_gen.runtime.models.encoders.qwen2_5_vl import (
    TP_PLAN,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLTextEncoder,
)
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry

from parity.tiny_qwen_image import TinyQwenImage, tiny_tokenizer

PUBLISHED = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
PUBLISHED_VISION = {"hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "depth": 32}


def published(cls: type = Qwen2_5_VLForConditionalGeneration) -> Any:
    config = transformers.Qwen2_5_VLConfig(text_config=PUBLISHED, vision_config=PUBLISHED_VISION)
    with torch.device("meta"):
        return cls(config)


def test_without_the_vision_tower_it_is_smaller_by_that():
    whole, blind = (
        sum(parameter.numel() for parameter in published(cls).parameters())
        for cls in (Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLTextEncoder)
    )
    assert 0.67e9 < whole - blind < 0.69e9
    planned = PlannedModel(published(Qwen2_5_VLTextEncoder), plan_of(Qwen2_5_VLTextEncoder))
    assert planned.misfit(4) == ""


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_holds_its_part(size):
    model = published()
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert 7.7e9 < whole < 7.8e9, "without the head that predicts words"
    planned = PlannedModel(model, plan_of(Qwen2_5_VLForConditionalGeneration))
    assert planned.misfit(size) == ""
    assert planned.misfit(8) == "num_attention_heads=28 of Qwen2_5_VLForConditionalGeneration"
    planned.apply(Group("weights", 0, tuple(range(size))))
    held = sum(parameter.numel() for parameter in model.parameters())
    assert held < 1.002 * whole / size
    assert model.model.visual.blocks[0].attn.num_heads == 16 // size


def test_ours_answers_to_the_librarys_name():
    name = "Qwen2_5_VLForConditionalGeneration"
    assert ModelRegistry.resolve_model_cls(name)[0] is Qwen2_5_VLForConditionalGeneration
    assert not Qwen2_5_VLForConditionalGeneration.is_custom_code()
    assert TP_PLAN


@torch.no_grad()
def test_tokens_of_pictures_stand_at_three_positions():
    """As the library has it where it is told which tokens those are; and not as where it is not."""
    tokenizer = tiny_tokenizer()
    reference = TinyQwenImage("any")._text_encoder(tokenizer).eval()
    own = Qwen2_5_VLForConditionalGeneration(reference.config).eval()
    own.load_state_dict(
        {k: v for k, v in reference.state_dict().items() if not k.startswith("lm_head")}
    )
    picture = "<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>"
    ids = tokenizer(f"the {picture} red fox", return_tensors="pt").input_ids
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.randn(24, 3 * 2 * 14 * 14, generator=torch.manual_seed(0)),
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
    }
    kinds = (ids == reference.config.image_token_id).int()
    ours = own(**inputs).last_hidden_state
    told = reference(**inputs, mm_token_type_ids=kinds, output_hidden_states=True)
    untold = reference(**inputs, output_hidden_states=True)
    assert torch.allclose(ours, told.hidden_states[-1], atol=1e-5)
    assert (ours - untold.hidden_states[-1]).abs().max() > 0.1
    other = own(**{**inputs, "pixel_values": inputs["pixel_values"] * -1}).last_hidden_state
    assert (ours - other).abs().max() > 0.1
