"""What a caller may set for FLUX.1."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.multimodal_gen.configs.sample.sampling_params import ImageSamplingParams


@dataclass
class FluxSamplingParams(ImageSamplingParams):
    """FLUX.1-dev: guidance is distilled into the model, so one forward a step."""

    height: int | None = 1024
    width: int | None = 1024
    num_inference_steps: int = 28
    guidance_scale: float = 3.5
    max_sequence_length: int | None = 512


@dataclass
class FluxSchnellSamplingParams(FluxSamplingParams):
    """FLUX.1-schnell: distilled to four steps; takes no guidance."""

    num_inference_steps: int = 4
    max_sequence_length: int | None = 256
