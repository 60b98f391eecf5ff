"""Tracks: where the shape of each clip is in each frame and how large, in pixels; and rendering.

Legend: B clips, F frames.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from examples.train_demo_model.layout import EXTENTS
from examples.train_demo_model.render import coverage
from examples.train_demo_model.scenes import KINDS, PALETTE
from examples.train_demo_video.clips import Clip

CANVAS, FRAMES = 64, 17
MARGIN = 1.5
"""Pixels kept free at each edge."""
LEAST_TRAVEL = 18.0
"""Pixels that a moving shape goes, at least; at most as far as the canvas lets it."""
SCALES = {"small": (8.5, 9.5), "large": (12.5, 14.5), "": (8.5, 14.5)}
"""The scale of a shape in pixels: a circle's radius, and alike for the others."""
SIZE_BORDER = 11.0
GROWTH = ((7.5, 9.0), (13.0, 14.5))
"""The smaller and the larger scale of a shape that grows or shrinks."""
_DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}
_REACH = np.array([EXTENTS[kind] for kind in KINDS], dtype=np.float32)
_COLOURS = tuple(PALETTE)


class Tracks(NamedTuple):
    """Clips as arrays, with the first and last state of each shape; between, all is linear."""

    background: np.ndarray
    """[B] int64, index into the palette."""
    kind: np.ndarray
    """[B] int64."""
    colour: np.ndarray
    """[B] int64."""
    scale: np.ndarray
    """[B, 2] float32, pixels: first and last."""
    centre: np.ndarray
    """[B, 2, 2] float32: first and last; x then y of the centroid, from the top left corner."""


def draw_tracks(clips: list[Clip], rng: np.random.Generator) -> Tracks:
    """A random track of each clip, in which all its words are true."""
    count = len(clips)
    kind = np.array([KINDS.index(clip.kind) for clip in clips], dtype=np.int64)
    ranges = np.array([_scales(clip) for clip in clips], dtype=np.float32)
    scale = ranges[..., 0] + (ranges[..., 1] - ranges[..., 0]) * rng.random((count, 1))
    widest = scale.max(axis=1)[:, None] * _REACH[kind]
    least = np.stack((widest[:, 0], widest[:, 1]), axis=1) + MARGIN
    most = CANVAS - np.stack((widest[:, 0], widest[:, 2]), axis=1) - MARGIN
    way = np.array([_DIRECTIONS.get(clip.motion, (0, 0)) for clip in clips], dtype=np.float32)
    free = most - least
    travel = LEAST_TRAVEL + (free - LEAST_TRAVEL).clip(0) * rng.random((count, 1))
    step = way * travel
    # The whole track fits: its start is drawn from what the travel leaves free.
    low = least - np.minimum(step, 0)
    start = low + (free - np.abs(step)) * rng.random((count, 2))
    centre = np.stack((start, start + step), axis=1)
    return Tracks(
        np.array([_COLOURS.index(clip.background) for clip in clips], dtype=np.int64),
        kind,
        np.array([_COLOURS.index(clip.colour) for clip in clips], dtype=np.int64),
        scale.astype(np.float32),
        centre.astype(np.float32),
    )


def to_device(tracks: Tracks, device: torch.device | str) -> list[Tensor]:
    """The fields as tensors on a device, in the order of :class:`Tracks`."""
    return [torch.from_numpy(field).to(device) for field in tracks]


def render(fields: list[Tensor], palette: Tensor, frames: int = FRAMES) -> Tensor:
    """Clips of tracks on the device, float32 [B, 3, F, 64, 64] in -1..1."""
    background, kind, colour, scale, centre = fields
    time = torch.linspace(0, 1, frames, device=scale.device)
    scale_BF = torch.lerp(scale[:, :1], scale[:, 1:], time)
    centre_BF = torch.lerp(centre[:, :1], centre[:, 1:], time[:, None])
    alpha = coverage(kind[:, None].expand(-1, frames), scale_BF, centre_BF, size=CANVAS)[:, None]
    ground, paint = (palette[index][..., None, None, None] for index in (background, colour))
    return torch.lerp(ground, paint, alpha)


def to_uint8(clips: Tensor) -> np.ndarray:
    """-1..1 [B, 3, F, H, W] to uint8 [B, F, H, W, 3]."""
    scaled = ((clips.float() + 1) * 127.5).round().clamp(0, 255)
    return scaled.to(torch.uint8).permute(0, 2, 3, 4, 1).cpu().numpy()


def _scales(clip: Clip) -> tuple[tuple[float, float], tuple[float, float]]:
    """Ranges of the first and last scale; one lot is drawn for both."""
    if clip.motion == "growing":
        return GROWTH
    if clip.motion == "shrinking":
        return GROWTH[1], GROWTH[0]
    return SCALES[clip.size], SCALES[clip.size]
