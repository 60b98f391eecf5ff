"""Progress as data: what long work tells whoever watches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

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
