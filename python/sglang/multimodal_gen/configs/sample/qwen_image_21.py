"""What a caller may set for Qwen-Image 2.1."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.multimodal_gen.configs.sample.sampling_params import ImageSamplingParams


@dataclass
class QwenImage21SamplingParams(ImageSamplingParams):
    """Made of text, and of pictures where there are any; the last one gives the result its shape
    unless a size is given. Guidance is off unless a scale and a negative prompt are given."""

    num_inference_steps: int = 40
    true_cfg_scale: float | None = 1.0
