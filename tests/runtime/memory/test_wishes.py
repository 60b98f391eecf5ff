"""Flags to modes, and what is refused."""

from __future__ import annotations

import pytest

from sglang.multimodal_gen.runtime.memory.plan import ComponentFacts, Residency
from sglang.multimodal_gen.runtime.memory.wishes import wishes_of
from sglang.multimodal_gen.runtime.server_args.memory_args import MemoryArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

R, C, L = Residency.RESIDENT, Residency.COMPONENT, Residency.LAYERWISE
COMPONENTS = (
    ComponentFacts("text_encoder", "text_encoder", 1, (1,), True),
    ComponentFacts("text_encoder_2", "text_encoder", 1, (1,), True),
    ComponentFacts("transformer", "dit", 1, (1,), True),
    ComponentFacts("vae", "vae", 1, (1,), True),
    ComponentFacts("queryformer", "queryformer", 1),
)
STREAMING = COMPONENTS[:4]


def modes(components=STREAMING, **flags):
    return wishes_of(MemoryArgs(**flags), components, ["scheduler", "tokenizer"]).modes


@pytest.mark.parametrize(
    ("flags", "wished"),
    [
        ({}, {}),
        ({"layerwise_offload_components": ("all",)}, dict.fromkeys(["text_encoder",
          "text_encoder_2", "transformer", "vae"], L)),
        ({"layerwise_offload_components": ("dit",)}, {"transformer": L}),
        ({"layerwise_offload_components": ("default",)},
         {"text_encoder": L, "text_encoder_2": L, "vae": L}),
        ({"layerwise_offload_components": ("dit,text_encoder_2",)},
         {"transformer": L, "text_encoder_2": L}),
        ({"cpu_offload_components": ("text_encoder", "vae")},
         {"text_encoder": C, "text_encoder_2": C, "vae": C}),
        ({"text_encoder_cpu_offload": True}, {"text_encoder": C, "text_encoder_2": C}),
        ({"text_encoder_cpu_offload": True, "cpu_offload_components": ("text_encoder",)},
         {"text_encoder": C, "text_encoder_2": C}),
        ({"dit_cpu_offload": False, "vae_cpu_offload": True}, {"transformer": R, "vae": C}),
        ({"image_encoder_cpu_offload": False}, {}),
        ({"cpu_offload_components": ("none",), "layerwise_offload_components": ("dit",)},
         {"text_encoder": R, "text_encoder_2": R, "transformer": L, "vae": R}),
        ({"dit_cpu_offload": False, "layerwise_offload_components": ("dit",)},
         {"transformer": L}),
        ({"use_fsdp_inference": True}, {"transformer": R}),
    ],
)  # fmt: skip
def test_what_flags_say(flags, wished):
    assert modes(**flags) == wished


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"layerwise_offload_components": ("vae",), "vae_cpu_offload": True},
         r"^vae_cpu_offload=True: vae would be layerwise-offload by layerwise_offload_components"),
        ({"layerwise_offload_components": ("all",), "cpu_offload_components": ("transformer",)},
         "transformer would be layerwise-offload by"),
        ({"cpu_offload_components": ("vae",), "vae_cpu_offload": False},
         "vae would be component-offload by cpu_offload_components and resident here"),
        ({"use_fsdp_inference": True, "layerwise_offload_components": ("dit",)},
         r"^use_fsdp_inference=True: transformer would be layerwise-offload"),
        ({"use_fsdp_inference": True, "dit_cpu_offload": True}, "Choose one"),
        ({"cpu_offload_components": ("transfomer",)}, "Did you mean 'transformer'"),
        ({"layerwise_offload_components": ("scheduler",)}, "has no weights"),
        ({"layerwise_offload_components": ("image_encoder",)},
         "no component of the kind 'image_encoder'"),
        ({"image_encoder_cpu_offload": True}, "no component of the kind 'image_encoder'"),
        ({"dit_offload_prefetch_size": 2.0}, "add --layerwise-offload-components dit"),
        ({"dit_layerwise_resident_layers": 0.5, "layerwise_offload_components": ("vae",)},
         "says how a denoiser is streamed"),
    ],
)  # fmt: skip
def test_what_is_refused(flags, problem):
    with pytest.raises(InvalidArgument, match=problem):
        modes(**flags)


@pytest.mark.parametrize("name", ["queryformer", "all"])
def test_a_class_without_blocks_cannot_be_streamed(name):
    with pytest.raises(InvalidArgument, match=r"queryformer cannot be streamed.*text_encoder_2"):
        modes(COMPONENTS, layerwise_offload_components=(name,))
    assert modes(COMPONENTS, cpu_offload_components=("queryformer",)) == {"queryformer": C}
