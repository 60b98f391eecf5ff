"""Compiled denoisers of whole pipelines: what is said, what comes out, what is refused."""

from __future__ import annotations

import functools

import pytest
import torch
import torch._inductor.config
from torch import nn

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.cache.compiled_blocks import CompiledBlocks
from sglang.multimodal_gen.runtime.layers.attention.backends.backend import ByLength
from sglang.multimodal_gen.runtime.layers.attention.backends.flex import FlexAttention
from sglang.multimodal_gen.runtime.layers.attention.backends.sdpa import SDPA, TorchSDPA
from sglang.multimodal_gen.runtime.layers.quantization.fp8 import Fp8Method
from sglang.multimodal_gen.runtime.layers.quantization.install import quantize_linears
from sglang.multimodal_gen.runtime.loader import compile_denoisers as loader
from sglang.multimodal_gen.runtime.memory.layerwise import LayerwiseOffloadableModuleMixin
from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.server_args.speed_section import SpeedArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

ASKED = SpeedArgs(enable_torch_compile=True)


@pytest.fixture(autouse=True)
def _quick(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    quick = functools.partial(CompiledBlocks, backend="eager")
    monkeypatch.setattr(loader, "CompiledBlocks", quick)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pictures(**flags):
    with DiffGenerator.from_pretrained("demo", device="cpu", **flags) as generator:
        results = [
            generator.generate(prompt=text, seed=1, num_inference_steps=2)[0].array
            for text in ("a red circle", "a blue square")
        ]
        made = [torch.from_numpy(array).float() for array in results]
        pipeline = generator.pipeline
        return made, None if pipeline.compiled is None else pipeline.compiled.counters, pipeline


def whole(pipeline):
    denoiser = pipeline.get_module("transformer")
    return sum(len(denoiser.get_submodule(name)) for name in denoiser.layer_names)


def test_pictures_are_those_of_blocks_that_are_not_compiled(tmp_path):
    want, counters, _ = pictures()
    assert counters is None
    made, counters, pipeline = pictures(enable_torch_compile=True)
    blocks, graphs = whole(pipeline), counters.graphs
    for one, other in zip(made, want, strict=True):
        assert (one - other).abs().max() <= 1
    assert not torch.equal(*made)
    # By class of block; the second prompt, another length of text at most.
    assert 1 <= len(graphs) <= 2
    assert max(graphs.values()) <= 3
    (note,) = (note for note in pipeline.notes if note.startswith("torch.compile"))
    assert f"{blocks} blocks of transformer" in note
    assert str(tmp_path) in note
    assert counters.blocks == 0, "closed: blocks run as they are written"


def test_streamed_blocks_are_compiled_with_their_weights_arriving():
    flags = {"layerwise_offload_components": ["transformer"]}
    want, _, pipeline = pictures(**flags)
    made, counters, pipeline = pictures(enable_torch_compile=True, **flags)
    for one, other in zip(made, want, strict=True):
        assert (one - other).abs().max() <= 1
    assert 1 <= max(counters.graphs.values()) <= 3
    assert pipeline._offloaded["transformer"].stream_counters.hits > 0


class Blocks(nn.Module, LayerwiseOffloadableModuleMixin):
    layer_names = ["blocks"]

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16))])


def compiled(modules, speed=ASKED, device="cpu"):
    return loader.compile_denoisers(modules, {name: name for name in modules}, speed, device)


def test_what_the_machine_lacks_is_told_before_weights_are_read(monkeypatch):
    monkeypatch.setattr(loader, "HAS_TRITON", False)
    with pytest.raises(InvalidArgument, match="needs Triton"):
        loader.check_machine("cuda")
    reads = []
    monkeypatch.setattr(ComposedPipelineBase, "_load_modules", lambda *_: reads.append(1))
    absent = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with absent, pytest.raises(InvalidArgument, match=r"needs a C\+\+ compiler"):
        pictures(enable_torch_compile=True)
    assert not reads, "before weights are read"


def test_two_experts_of_one_class_are_one_kind_of_code():
    _, note = compiled({"transformer": Blocks(), "transformer_2": Blocks()})
    assert "2 blocks of transformer and transformer_2, 1 kinds of code" in note


def test_what_cannot_be_compiled_is_refused_with_the_remedy():
    with pytest.raises(InvalidArgument, match=r"no repeated blocks.*Leave it out"):
        compiled({"transformer": nn.Linear(2, 2)})
    quantized = Blocks().requires_grad_(False)
    quantize_linears(quantized, Fp8Method())
    with pytest.raises(InvalidArgument, match=r"eight bits.*Leave it out"):
        compiled({"transformer": quantized})
    with pytest.raises(InvalidArgument, match=r"no component of this pipeline \(vae\)"):
        compiled({"vae": Blocks()})
    assert compiled({"transformer": Blocks()}, SpeedArgs()) == (None, None)


def test_attention_that_can_be_seen_through():
    assert loader.attention_for_compiling(SDPA, "so") == (SDPA, "so")
    one = TorchSDPA("torch_math", None)
    assert loader.attention_for_compiling(one, None)[0] is one
    chosen, note = loader.attention_for_compiling(ByLength("auto", SDPA, SDPA, 1, (8,)), None)
    assert chosen is SDPA
    assert "FlashAttention's kernel is not compiled" in note
    with pytest.raises(InvalidArgument, match=r"attention_backend='flex'.*use torch_sdpa"):
        loader.attention_for_compiling(FlexAttention(), None)
