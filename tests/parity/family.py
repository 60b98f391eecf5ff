"""What the harness must know about a model family: one record for all its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.utils.image_file import load_input_image

Request = Mapping[str, Any]
"""Sampling fields by this runtime's names."""


def another_text(text: str | list[str]) -> str | list[str]:
    """Other words of another length."""
    words = "nine grey owls, asleep"
    return words if isinstance(text, str) else [f"{words} {index}" for index in range(len(text))]


OTHER_VALUES: Mapping[str, Callable[[Any], Any]] = {
    "prompt": another_text,
    "seed": lambda seed: seed + 1000,
    "guidance_scale": lambda scale: 2 * scale + 1,
    "negative_prompt": another_text,
    "true_cfg_scale": lambda scale: 2 * scale + 1,
}


def plain_arguments(pipeline: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The reference's arguments are this runtime's settings, and pictures in place of paths."""
    if "image_path" in arguments:
        paths = arguments.pop("image_path")
        one = isinstance(paths, str)
        images = [load_input_image(path) for path in ([paths] if one else paths)]
        arguments["image"] = images[0] if one else images
    return arguments


def from_folder(reference: str, folder: Path) -> Any:
    """The Diffusers pipeline of class ``reference``, in fp32."""
    return getattr(diffusers, reference).from_pretrained(folder, dtype=torch.float32)


@dataclass(frozen=True)
class Family:
    """How to run a family's reference, what to compare, and what must move its picture."""

    reference: str
    """Class name of the Diffusers pipeline."""
    inputs: tuple[str, ...]
    """Denoiser inputs to compare: parameter names that the reference and this runtime share.

    Each has one row for each image, or one row or a scalar for all of them.
    """
    latents_of: Callable[[Mapping[str, Tensor]], Tensor] = lambda inputs: inputs["hidden_states"]
    """Where the latents are among those inputs."""
    target_last: bool = False
    """Whether the tokens of the picture to make come last, in what the denoisers are given and in
    what they answer; what they are given besides the latents is then not compared there."""
    denoisers: tuple[str, ...] = ("transformer",)
    """Component names, those that run first leading."""
    decoder: str = "vae"
    """Component whose ``decode`` turns latents into pixels."""
    other: Mapping[str, Callable[[Any], Any]] = field(default_factory=lambda: OTHER_VALUES)
    """Sampling fields that must move the picture where a request sets them, with another value."""
    without_effect: tuple[str, ...] = ()
    """Fields among `other` that this family's reference ignores."""
    clips: bool = False
    """Whether it makes clips."""
    guidance: str = "true_cfg_scale"
    """The field that turns classifier-free guidance on, above 1."""
    arguments: Callable[[Any, dict[str, Any]], dict[str, Any]] = plain_arguments
    """Settings of this runtime as the arguments of the loaded reference, which it may set up."""
    own_inputs: Mapping[str, str] = field(default_factory=dict)
    """Inputs that this runtime's denoiser has under another name: theirs -> ours."""
    load: Callable[[str, Path], Any] = from_folder
    """Opens the reference, by its class and folder, where it needs more than its own loading."""


FLUX_DEV = Family(
    reference="FluxPipeline",
    inputs=(
        "hidden_states",
        "encoder_hidden_states",
        "pooled_projections",
        "timestep",
        "guidance",
    ),
)
FLUX_SCHNELL = Family(FLUX_DEV.reference, FLUX_DEV.inputs, without_effect=("guidance_scale",))
