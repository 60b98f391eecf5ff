"""Which memory flags reach Diffusers' offload; the calls are watched, for it needs a GPU."""

from __future__ import annotations

import pytest
from diffusers import DDPMPipeline, StableDiffusionPipeline

from sglang.multimodal_gen.runtime.diffusers_backend import offload
from sglang.multimodal_gen.runtime.loader.model_source import resolve_model_source
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument


class Pipeline:
    def __init__(self):
        self.calls = []

    def to(self, device):
        self.calls.append(("to", device))

    def enable_model_cpu_offload(self, device):
        self.calls.append(("enable_model_cpu_offload", device))


@pytest.fixture
def source(tiny):
    return resolve_model_source(str(tiny("unet")), None)


def arguments(source, device="cuda", **memory):
    return ServerArgs.from_flat(model_path=str(source.root), device=device, **memory)


@pytest.mark.parametrize(
    "memory",
    [
        {"cpu_offload_components": ["all"]},
        {"cpu_offload_components": ["dit", "vae"]},
        {"cpu_offload_components": ["unet"]},
        {"dit_cpu_offload": True},
        {"text_encoder_cpu_offload": True, "vae_cpu_offload": True},
    ],
)
def test_any_component_offloaded_is_all_offloaded_and_told(source, memory):
    args = arguments(source, **memory)
    offload.check_memory(args, source, StableDiffusionPipeline)
    pipeline = Pipeline()
    offload.place(pipeline, args)
    assert pipeline.calls == [("enable_model_cpu_offload", "cuda")]
    assert f"{next(iter(memory))} asks for offload" in offload.offload_note(args)


@pytest.mark.parametrize(
    "memory", [{}, {"cpu_offload_components": ["none"]}, {"vae_cpu_offload": False}]
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_otherwise_the_pipeline_is_put_on_the_device(source, device, memory):
    args = arguments(source, device, **memory)
    offload.check_memory(args, source, StableDiffusionPipeline)
    pipeline = Pipeline()
    offload.place(pipeline, args)
    assert pipeline.calls == [("to", device)]
    assert offload.offload_note(args) is None


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({"layerwise_offload_components": ["all"]}, "use --cpu-offload-components all"),
        ({"dit_offload_prefetch_size": 2.0}, "dit_offload_prefetch_size=2.0: the Diffusers"),
        ({"pin_cpu_memory": False}, "pin_cpu_memory=False"),
        ({"use_fsdp_inference": True}, "use_fsdp_inference=True"),
        ({"dit_cpu_offload": True, "vae_cpu_offload": False}, "vae_cpu_offload=False: Diffusers"),
        ({"cpu_offload_components": ["unett"]}, "Did you mean 'unet'"),
        ({"cpu_offload_components": ["image_encoder"]}, "has no such component"),
        ({"image_encoder_cpu_offload": True}, "no component of the kind 'image_encoder'"),
    ],
)
def test_what_diffusers_cannot_do_is_refused(source, memory, message):
    with pytest.raises(InvalidArgument, match=message):
        offload.check_memory(arguments(source, **memory), source, StableDiffusionPipeline)


def test_offload_needs_an_accelerator_an_order_and_accelerate(source, monkeypatch):
    wish = {"cpu_offload_components": ["all"]}
    with pytest.raises(InvalidArgument, match="needs an accelerator"):
        offload.check_memory(arguments(source, "cpu", **wish), source, StableDiffusionPipeline)
    monkeypatch.setattr(DDPMPipeline, "model_cpu_offload_seq", None)
    with pytest.raises(InvalidArgument, match="declares no order"):
        offload.check_memory(arguments(source, **wish), source, DDPMPipeline)
    monkeypatch.setattr(offload, "is_accelerate_available", lambda: False)
    with pytest.raises(InvalidArgument, match=r"sglang-diffusion\[diffusers\]"):
        offload.check_memory(arguments(source, **wish), source, StableDiffusionPipeline)
