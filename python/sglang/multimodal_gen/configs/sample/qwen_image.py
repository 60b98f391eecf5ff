"""What a caller may set for Qwen-Image and its editing models."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.multimodal_gen.configs.sample.sampling_params import ImageSamplingParams


@dataclass
class QwenImageSamplingParams(ImageSamplingParams):
    """Guided by a second forward on the negative prompt, a blank unless another is given."""

    height: int | None = 1328
    width: int | None = 1328
    num_inference_steps: int = 50
    negative_prompt: str | None = " "
    true_cfg_scale: float | None = 4.0
    max_sequence_length: int | None = 512


@dataclass
class QwenImageEditSamplingParams(QwenImageSamplingParams):
    """Edits one picture, whose shape the result has unless a size is given."""

    height: int | None = None
    width: int | None = None
    max_sequence_length: int | None = None


@dataclass
class QwenImageEditPlusSamplingParams(QwenImageEditSamplingParams):
    """Makes one picture of several; the shape is that of the last of them."""

    num_inference_steps: int = 40
