"""The attention backend of a whole pipeline."""

from __future__ import annotations

import pytest
import torch

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.layers.attention.backends.libraries import flash_backend
from sglang.multimodal_gen.runtime.layers.attention.backends.with_lse import attend_with_lse
from sglang.multimodal_gen.runtime.pipelines_core import composed_pipeline_base
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument


def picture(**flags):
    with DiffGenerator.from_pretrained("demo", device="cpu", **flags) as generator:
        made = generator.generate(prompt="a red circle", seed=1, num_inference_steps=2)
        return torch.from_numpy(made[0].array).float(), generator.pipeline


def test_what_cannot_be_is_refused_before_weights_are_read(monkeypatch):
    monkeypatch.setattr(composed_pipeline_base, "load_components", None)
    with pytest.raises(InvalidArgument, match="attention_backend='fa3': needs a CUDA GPU"):
        picture(attention_backend="fa3")


def test_every_layer_of_the_denoiser_gets_it(monkeypatch):
    want, pipeline = picture(attention_backend="torch_sdpa")
    assert not any("attention" in note for note in pipeline.notes)

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
        return attend_with_lse(q, k, v, mask=None, causal=causal)[0]

    backend = flash_backend("fa2", flash_attn_func, (torch.float32,))
    chosen = backend, "attention: a stand-in"
    monkeypatch.setattr(composed_pipeline_base, "choose_backend", lambda *_, **__: chosen)
    found, pipeline = picture()
    assert (found - want).abs().max() <= 1
    assert "attention: a stand-in" in pipeline.notes
    denoiser = pipeline.get_module("transformer")
    layers = len(denoiser.transformer_blocks) + len(denoiser.single_transformer_blocks)
    assert backend.calls == {"kernel": 2 * 2 * layers}  # two steps, each with guidance
    narrow = flash_backend("fa2", flash_attn_func)
    monkeypatch.setattr(composed_pipeline_base, "choose_backend", lambda *_, **__: (narrow, None))
    with pytest.raises(InvalidArgument, match="takes bfloat16 and float16, and transformer comp"):
        picture()
