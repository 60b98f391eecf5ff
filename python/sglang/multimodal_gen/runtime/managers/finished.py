"""What a finished batch is to its caller: pixels as numbers, and the settings that made them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch

_OF_EACH_IMAGE = ("prompt", "seed")
GIVEN = "given"
"""What a finished job's settings say in place of an input's path."""


@dataclass(frozen=True, slots=True, eq=False)
class FinishedImage:
    """One picture: uint8 [H, W, 3], or [H, W, 4] with transparency; and what made it."""

    array: np.ndarray = field(repr=False)
    prompt: str
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class FinishedVideo:
    """One clip: uint8 [F, H, W, 3] to be shown at ``fps``, and what made it."""

    frames: np.ndarray = field(repr=False)
    fps: int
    prompt: str
    seed: int


Finished = FinishedImage | FinishedVideo


def finished_of(output: OutputBatch) -> list[Finished]:
    """The images or clips of a batch, in order."""
    makers = zip(pixels_of(output.output), output.prompt, output.seeds, strict=True)
    if output.output.ndim == 4:
        return [FinishedImage(*made) for made in makers]
    assert output.fps is not None, "admission gives clips a rate"
    return [FinishedVideo(frames, output.fps, prompt, seed) for frames, prompt, seed in makers]


def pixels_of(output: Tensor) -> list[np.ndarray]:
    """uint8 [H, W, C] of each image of float [B, C, H, W] in 0..1.

    Clips are uint8 [B, F, H, W, 3] already.
    """
    if output.ndim == 5:
        return [np.ascontiguousarray(clip.numpy()) for clip in output]
    pixels = (output * 255).round().byte().permute(0, 2, 3, 1).numpy()
    return [np.ascontiguousarray(array) for array in pixels]


def settings_of(params: SamplingParams) -> dict[str, Any]:
    """The settings in force, without what each image carries itself (prompt and seed)."""
    values = {
        name: getattr(params, name) for name in params.field_names() if name not in _OF_EACH_IMAGE
    }
    choices = params.lora_choices
    if choices is not None:
        values["lora"] = [choice.as_setting() for choice in choices]
    values["task_type"] = getattr(values["task_type"], "name", values["task_type"])
    return {name: value for name, value in values.items() if value is not None}
