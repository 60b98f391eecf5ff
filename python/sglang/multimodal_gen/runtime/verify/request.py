"""The one request that a check runs, in this runtime's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

PROMPT = "a small red circle above a large blue square"
NEGATIVE = "green words, cut off"
STEPS = 3
GUIDANCE = 3.5
TRUE_CFG = 3.0
TEXT_TOKENS = 48
"""Enough for the prompt, and some padding; the reference's limit where that is lower."""

OTHER: Mapping[str, Callable[[Any], Any]] = {
    "prompt": lambda _: "nine grey owls, asleep",
    "seed": lambda seed: seed + 1000,
    "guidance_scale": lambda scale: 2 * scale + 1,
    "negative_prompt": lambda _: "yellow",
    "true_cfg_scale": lambda scale: 2 * scale + 1,
    "image": lambda image: image.rotate(90).point(lambda level: 255 - level),
}
"""What must move the picture -> another value."""


@dataclass(frozen=True)
class Request:
    """Sampling fields by name, and an input image where the task takes one."""

    values: Mapping[str, Any]
    image: Image.Image | None = field(default=None, repr=False)

    def __contains__(self, name: str) -> bool:
        return self.image is not None if name == "image" else name in self.values

    def changed(self, name: str) -> Request:
        """The same request with another value of one field."""
        if name == "image":
            return Request(self.values, OTHER[name](self.image))
        return Request({**self.values, name: OTHER[name](self.values[name])}, self.image)

    def without(self, *names: str) -> Request:
        """The same request without some fields; ``image`` is the input image."""
        image = None if "image" in names else self.image
        return Request({k: v for k, v in self.values.items() if k not in names}, image)


def base_request(
    size: tuple[int, int],
    seed: int,
    text_tokens: int | None,
    *,
    with_image: bool,
    frames: int | None = None,
) -> Request:
    """A request that turns everything on that a text-to-image model may have.

    ``text_tokens`` is the family's default of ``max_sequence_length``; None leaves it out. Where an
    image goes with it, all of them are asked for: references find the text's place by its length.
    """
    height, width = size
    values: dict[str, Any] = {
        "prompt": PROMPT,
        "negative_prompt": NEGATIVE,
        "seed": seed,
        "height": height,
        "width": width,
        "num_inference_steps": STEPS,
        "guidance_scale": GUIDANCE,
        "true_cfg_scale": TRUE_CFG,
    }
    if text_tokens is not None:
        values["max_sequence_length"] = text_tokens if with_image else min(text_tokens, TEXT_TOKENS)
    if frames is not None:
        values["num_frames"] = frames
    return Request(values, _drawing() if with_image else None)


def _drawing() -> Image.Image:
    """A picture with something in every corner; not symmetric."""
    image = Image.linear_gradient("L").resize((96, 64))
    return Image.merge("RGB", (image, image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), image))
