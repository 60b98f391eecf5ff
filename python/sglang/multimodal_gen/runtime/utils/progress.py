"""Progress as data: what long work tells whoever watches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

Phase = Literal["load", "denoise", "decode"]


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """One step forward in a phase.

    ``done`` and ``total`` count bytes while loading, scheduler steps while denoising and images
    while decoding; ``label`` names the component or stage at work.
    """

    phase: Phase
    done: int
    total: int
    label: str


ProgressListener = Callable[[ProgressEvent], None]


@dataclass(frozen=True, slots=True, eq=False)
class Preview:
    """What an image of a batch looks like after ``step`` of ``total`` steps.

    ``image`` counts from 0 within the batch; ``pixels`` is uint8 [H, W, C].
    """

    image: int
    step: int
    total: int
    pixels: np.ndarray


PreviewListener = Callable[[Preview], None]


def preview_steps(total: int, count: int) -> frozenset[int]:
    """The steps (counted from 1) after which ``count`` previews are shown: evenly, never the last.

    Fewer where there are fewer steps.
    """
    return frozenset(
        step for k in range(1, count + 1) if 0 < (step := k * total // (count + 1)) < total
    )
