"""What comes out of `DiffGenerator`: pictures and clips as numbers, and what made them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from PIL import Image


@dataclass(frozen=True, eq=False)
class GeneratedImage:
    """One picture: uint8 [H, W, 3], or [H, W, 4] with transparency; and what made it."""

    array: np.ndarray = field(repr=False)
    prompt: str
    seed: int

    @cached_property
    def image(self) -> Image.Image:
        """The picture for Pillow (and for a notebook to show)."""
        return Image.fromarray(self.array)

    def _repr_png_(self) -> bytes | None:
        return self.image._repr_png_()


@dataclass(frozen=True, eq=False)
class GeneratedVideo:
    """One clip: uint8 [F, H, W, 3] to be shown at ``fps`` frames a second, and what made it."""

    frames: np.ndarray = field(repr=False)
    fps: int
    prompt: str
    seed: int

    @property
    def seconds(self) -> float:
        """How long it plays."""
        return len(self.frames) / self.fps


Generated = GeneratedImage | GeneratedVideo
