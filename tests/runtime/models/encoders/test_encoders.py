"""The encoders' tables on the sizes that are published, without memory; ranks are in
``tests/parity/test_tensor_parallel.py``."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import CLIPTextConfig, CLIPVisionConfig, T5Config, UMT5Config

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.tensor_parallel import PlannedModel, plan_of
from sglang.multimodal_gen.runtime.models.encoders.clip import CLIPTextModel
from sglang.multimodal_gen.runtime.models.encoders.clip_vision import CLIPVisionModel
from sglang.multimodal_gen.runtime.models.encoders.t5 import T5EncoderModel
from sglang.multimodal_gen.runtime.models.encoders.umt5 import UMT5EncoderModel
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry

LARGE = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}


def clip() -> CLIPTextModel:
    with torch.device("meta"):
        return CLIPTextModel(CLIPTextConfig(**LARGE))


def t5(gate: str = "gated-gelu", layers: int = 24) -> T5EncoderModel:
    config = T5Config(**{**XXL, "num_layers": layers}, feed_forward_proj=gate)
    with torch.device("meta"):
        return T5EncoderModel(config)


def umt5() -> UMT5EncoderModel:
    with torch.device("meta"):
        return UMT5EncoderModel(UMT5Config(**XXL, feed_forward_proj="gated-gelu"))


def clip_vision() -> CLIPVisionModel:
    huge = {"hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 16}
    with torch.device("meta"):
        return CLIPVisionModel(CLIPVisionConfig(**huge, num_hidden_layers=32))


def held(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("make", "size"), [(clip, 4), (t5, 8), (umt5, 8), (clip_vision, 2)])
def test_a_rank_holds_its_part(make, size):
    model = make()
    whole = held(model)
    planned = PlannedModel(model, plan_of(type(model)))
    assert planned.misfit(size) == ""
    planned.apply(Group("weights", 0, tuple(range(size))))
    assert held(model) < 1.01 * whole / size


def test_what_does_not_divide_has_the_name_of_the_config():
    assert PlannedModel(clip(), plan_of(CLIPTextModel)).misfit(8) == (
        "num_attention_heads=12 of CLIPTextModel"
    )
    assert PlannedModel(t5(layers=1), plan_of(T5EncoderModel)).misfit(3) == (
        "num_heads=64 of T5EncoderModel"
    )


def test_a_t5_without_gates_has_the_same_table():
    model = t5("relu", layers=2)
    PlannedModel(model, plan_of(T5EncoderModel)).apply(Group("weights", 0, (0, 1)))
    layer = model.encoder.block[1].layer[1].DenseReluDense
    assert (layer.wi.weight.shape, layer.wo.weight.shape) == ((5120, 4096), (4096, 5120))
    assert model.encoder.block[1].layer[0].SelfAttention.n_heads == 32
    assert model.encoder.embed_tokens.weight is model.shared.weight


def test_each_layer_of_umt5_keeps_a_column_a_head_of_its_own_position_bias():
    model = umt5()
    PlannedModel(model, plan_of(UMT5EncoderModel)).apply(Group("weights", 0, tuple(range(8))))
    for block in model.encoder.block:
        attention = block.layer[0].SelfAttention
        assert attention.relative_attention_bias.weight.shape == (32, 8)
        assert (attention.n_heads, attention.inner_dim) == (8, 8 * 64)


@pytest.mark.parametrize("cls", [CLIPTextModel, CLIPVisionModel, T5EncoderModel, UMT5EncoderModel])
def test_ours_answers_to_the_librarys_name(cls):
    assert ModelRegistry.resolve_model_cls(cls.__name__)[0] is cls
    assert issubclass(cls, getattr(transformers, cls.__name__))
    assert not cls.is_custom_code(), "the library's table of old names would be passed over"
