"""Whole pipelines with their weights in host memory: the same pictures to the bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from runtime.memory.lanes import LateLane
from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.distributed.layout import ParallelLayout
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.loader.components import plan_memory
from sglang.multimodal_gen.runtime.loader.model_source import resolve_model_source
from sglang.multimodal_gen.runtime.memory.layerwise import streamed_blocks
from sglang.multimodal_gen.runtime.memory.plan import Residency
from sglang.multimodal_gen.runtime.pipelines.flux import FluxPipeline
from sglang.multimodal_gen.runtime.pipelines_core import composed_pipeline_base
from sglang.multimodal_gen.runtime.pipelines_core.link import component_uses
from sglang.multimodal_gen.runtime.pipelines_core.stages import DecodingStage, DenoisingStage
from sglang.multimodal_gen.runtime.platforms.copy_lane import CopyLane
from sglang.multimodal_gen.runtime.platforms.memory import MemoryFacts
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import (
    InternalError,
    InvalidArgument,
    OutOfMemory,
    PipelineDefinitionError,
)

from parity.tiny_adapters import diffusers_adapter
from seed_samples import my_model
from seed_samples.stubs import StubVAE, stub_modules

REQUEST = {"prompt": ["a fox", "a dog"], "seed": 3, "num_inference_steps": 3,
           "height": 64, "width": 96, "max_sequence_length": 32}  # fmt: skip
OFFLOADS: dict[str, dict[str, Any]] = {
    "all by layers": {"layerwise_offload_components": ["all"]},
    "all whole": {"cpu_offload_components": ["all"]},
    "mixed": {
        "layerwise_offload_components": ["dit"],
        "text_encoder_cpu_offload": True,
        "dit_offload_prefetch_size": 2.0,
        "dit_layerwise_resident_layers": 0.25,
    },
}


@pytest.fixture(params=[CopyLane, LateLane])
def lane(request, monkeypatch):
    monkeypatch.setattr(composed_pipeline_base, "copy_lane", lambda device: request.param(device))
    return request.param


@pytest.fixture(scope="module")
def resident(folder):
    with DiffGenerator.from_pretrained(str(folder), device="cpu") as generator:
        return pictures(generator)


def pictures(generator: DiffGenerator, **changes: Any) -> np.ndarray:
    return np.stack([image.array for image in generator.generate(**(REQUEST | changes)).images])


@pytest.mark.parametrize("kind", OFFLOADS)
def test_offloaded_pictures_are_the_same_to_the_bit(folder, resident, kind, lane):
    with DiffGenerator.from_pretrained(str(folder), device="cpu", **OFFLOADS[kind]) as generator:
        assert not np.array_equal(pictures(generator, seed=4), resident), "the seed must matter"
        for _ in range(2):
            assert np.array_equal(pictures(generator), resident)
        residency = generator.pipeline.residency
        for component in residency.components.values():
            assert isinstance(component.lane, lane)
            assert component.counters.uses == 3
            assert component.counters.bytes > 0
            assert component.is_home
        assert all(component.lane.held == 0 for component in residency.components.values())
        note = generator.notes[-1]
        assert note.startswith("memory: ")
        assert ("streamed by layers" in note) is (kind != "all whole")


def test_streaming_happened_and_stayed_within_its_ring(folder):
    flags = OFFLOADS["all by layers"]
    with DiffGenerator.from_pretrained(str(folder), device="cpu", **flags) as generator:
        pictures(generator)
        components = generator.pipeline.residency.components
        assert set(components) == {"text_encoder", "text_encoder_2", "transformer", "vae"}
        dit = components["transformer"]
        blocks = list(streamed_blocks(dit.module).values())
        assert dit.stream_counters.hits == len(blocks) * 3
        assert dit.stream_counters.misses == 0
        streamed = sum(p.nbytes for block in blocks for p in block.parameters())
        assert dit.stream_counters.bytes >= 3 * streamed
        texts = components["text_encoder"].device_bytes + components["text_encoder_2"].device_bytes
        meet = max(texts + dit.device_bytes, dit.device_bytes + components["vae"].device_bytes)
        assert dit.lane.peak == meet
        whole = sum(p.nbytes for c in components.values() for p in c.module.parameters())
        assert dit.lane.peak < 0.9 * whole
        # The plan said so before anything was loaded, up to the alignment of small tensors.
        assert generator.pipeline.plan.device_bytes == pytest.approx(meet, rel=0.1)


def test_without_room_for_two_components_they_take_turns(folder, resident, monkeypatch):
    def plan(*args, **kwargs):
        return dataclasses.replace(original(*args, **kwargs), overlap=False)

    original = composed_pipeline_base.plan_memory
    monkeypatch.setattr(composed_pipeline_base, "plan_memory", plan)
    flags = {"cpu_offload_components": ["all"]}
    with DiffGenerator.from_pretrained(str(folder), device="cpu", **flags) as generator:
        assert np.array_equal(pictures(generator), resident)
        components = generator.pipeline.residency.components
        assert all(c.counters.prefetched == 0 for c in components.values())
        assert components["vae"].lane.peak == components["transformer"].device_bytes


@pytest.mark.parametrize("kind", OFFLOADS)
@pytest.mark.parametrize("component", ["text_encoder_2", "transformer", "vae"])
def test_after_a_failed_request_residency_is_as_before(folder, resident, kind, component):
    with DiffGenerator.from_pretrained(str(folder), device="cpu", **OFFLOADS[kind]) as generator:
        module = generator.pipeline.get_module(component)
        blocks = module.decoder.up_blocks if component == "vae" else module.get_submodule(
            module.layer_names[-1])  # fmt: skip
        hook = blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(InternalError, match="ZeroDivisionError"):
            pictures(generator)
        hook.remove()
        components = generator.pipeline.residency.components
        assert all(part.is_home and not part.in_use for part in components.values())
        assert next(iter(components.values())).lane.held == 0
        assert np.array_equal(pictures(generator), resident)


@pytest.mark.parametrize("merge_mode", ["merge", "dynamic"])
def test_adapters_on_streamed_weights_are_the_same_to_the_bit(folder, tmp_path, merge_mode):
    made = {}
    for name, flags in (("resident", {}), *OFFLOADS.items()):
        with DiffGenerator.from_pretrained(str(folder), device="cpu", **flags) as generator:
            model = generator.pipeline.get_module("transformer")
            file = diffusers_adapter(model, 5).save(tmp_path / "adapter.safetensors")
            base = pictures(generator)
            generator.set_lora("style", str(file), strength=1.5, merge_mode=merge_mode)
            made[name] = pictures(generator)
            assert not np.array_equal(made[name], base), "the adapter must matter"
            asked = pictures(generator, lora=[f"style={1.5}"])
            generator.unset_lora()
            assert np.array_equal(pictures(generator), base), "the base comes back"
        if merge_mode == "dynamic":
            assert np.array_equal(asked, made[name])
        assert np.array_equal(made[name], made["resident"]), name


# What is chosen without a flag.


def test_a_small_gpu_is_planned_for_before_loading(folder):
    """The plan sees the device's free memory; here a device of 4 GiB and 2 MiB."""
    args = ServerArgs.from_flat(device="cuda", precision="fp32")
    tight = MemoryFacts((4 << 30) + 2_000_000, 16 << 30, 64 << 30)
    source = resolve_model_source(str(folder))
    names = {name: name for name in FluxPipeline._required_config_modules}
    parallel = ParallelState.single("cuda")
    plan = plan_memory(source, names, args, {}, {}, {}, parallel=parallel, memory=tight)
    offloaded = [n for n, p in plan.placements.items() if p.mode is not Residency.RESIDENT]
    assert offloaded
    assert plan.device_bytes <= 2_000_000
    few = MemoryFacts(4 << 30, 16 << 30, 64 << 30)
    with pytest.raises(OutOfMemory, match=r"transformer 1\.9 MiB.*beside 4\.0 GiB for activations"):
        plan_memory(source, names, args, {}, {}, {}, parallel=parallel, memory=few)


def test_ranks_share_the_memory_of_their_own_node(folder, monkeypatch):
    source = resolve_model_source(str(folder))
    names = {name: name for name in FluxPipeline._required_config_modules}
    four = dataclasses.replace(ParallelState.single(), layout=ParallelLayout(dp=4))

    def plan(free, parallel, **flags):
        args = ServerArgs.from_flat(device="cpu", precision="fp32", **flags)
        memory = MemoryFacts(free, None, free)
        return plan_memory(source, names, args, {}, {}, {}, parallel=parallel, memory=memory)

    need = plan(1 << 40, ParallelState.single()).device_bytes
    with pytest.raises(OutOfMemory):
        plan(3 * need, four)
    nodes = {"dp_size": 4, "nnodes": 2, "dist_init_addr": "host:29500"}
    assert plan(3 * need, four, **nodes)
    with pytest.raises(OutOfMemory):
        plan(2 * need - 2, four, **nodes)
    launched = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "host", "MASTER_PORT": "29500"}  # fmt: skip
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert plan(3 * need, four)


def test_a_component_that_rests_in_host_memory_is_loaded_there(folder):
    flags = {"layerwise_offload_components": ["all"], "precision": "bf16"}
    with DiffGenerator.from_pretrained(str(folder), device="cpu", **flags) as generator:
        for part in generator.pipeline.residency.components.values():
            start = part.host.data.data_ptr()
            inside = range(start, start + part.host.nbytes)
            assert all(p.data_ptr() in inside for p in part.module.parameters())
            assert {p.dtype for p in part.module.parameters()} <= {torch.bfloat16, torch.float32}
            assert part.lane.peak == 0


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"vae_cpu_offload": True, "layerwise_offload_components": ["all"]}, "Choose one"),
        ({"cpu_offload_components": ["text_encoder_3"]}, "Did you mean 'text_encoder_2'"),
        ({"use_fsdp_inference": True}, "one rank alone has nobody to share the weights with"),
        ({"use_fsdp_inference": True, "dit_cpu_offload": True}, "Choose one"),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_loading(folder, flags, problem):
    seen = []
    with pytest.raises(InvalidArgument, match=problem):
        DiffGenerator.from_pretrained(str(folder), device="cpu", progress=seen.append, **flags)
    assert not seen


# Components that are handed in ready.


class SmallConfig(my_model.MyModelPipelineConfig):
    pass


def build(**flags: Any) -> my_model.MyModelPipeline:
    args = ServerArgs.from_flat(device="cpu", pipeline_config=SmallConfig(), **flags)
    return my_model.MyModelPipeline("org/my", args, loaded_modules=stub_modules())


def test_ready_components_stay_unless_a_flag_names_them():
    assert build().residency.components == {}
    pipeline = build(cpu_offload_components=["vae"])
    assert list(pipeline.residency.components) == ["vae"]
    part = pipeline.residency.components["vae"]
    assert part.module.out.weight.data_ptr() == part.host.data.data_ptr()
    with pytest.raises(InvalidArgument, match="transformer cannot be streamed"):
        build(layerwise_offload_components=["dit"])


# What stages declare.


def test_the_standard_stages_declare_what_they_use():
    uses = build().stage_uses
    assert uses == {
        "input_validation_stage": (),
        "text_encoding_stage": ("text_encoder",),
        "latent_preparation_stage": (),
        "timestep_preparation_stage": (),
        "denoising_stage": ("transformer",),
        "decoding_stage": ("vae",),
    }


def test_a_stage_that_declares_nothing_uses_what_it_holds():
    modules = stub_modules()
    stage = my_model.MyModelConditioningStage(modules["scheduler"], modules["vae"].out)
    assert component_uses(stage, modules) == ("vae",), "a part of a component is that component"


class Sly(DecodingStage):
    def __init__(self, vae: Any, text_encoder: nn.Module) -> None:
        super().__init__(vae)
        self.rewriter = [text_encoder]


class Misspelt(DenoisingStage):
    uses = ("transfomer",)


def test_declarations_that_do_not_hold_are_the_porters_error():
    modules = stub_modules()
    with pytest.raises(PipelineDefinitionError, match=r"holds the component 'text_encoder' in 're"):
        component_uses(Sly(modules["vae"], modules["text_encoder"]), modules)
    with pytest.raises(PipelineDefinitionError, match="Did you mean 'transformer'"):
        component_uses(Misspelt(modules["transformer"], modules["scheduler"]), modules)
    with pytest.raises(PipelineDefinitionError, match="holds a StubVAE, which is no component"):
        component_uses(DecodingStage(StubVAE()), modules)
