"""The grader: does a clip show what its prompt says? By image analysis of each frame, no network.

A clip is *right* if in all frames but one the background has its colour and there is one shape, of
its kind and colour, and if that shape has its size and goes the way that was asked for.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from examples.train_demo_model.grade import LEAST_MATCH, Fault, Found, detect
from examples.train_demo_model.layout import CANVAS as PICTURE
from examples.train_demo_video.clips import Clip
from examples.train_demo_video.tracks import CANVAS, SIZE_BORDER

WRONG_FRAMES = 1
"""Frames that may be wrong in one way: a key frame of the causal autoencoder may flicker."""
SIZE_TOLERANCE = 0.75
LEAST_TRAVEL = 12.0
"""Pixels between the first and the last frame that count as moving."""
DRIFT = 4.0
"""Pixels that a shape may go where it should not."""
GROWTH = 1.35
"""Ratio of the last scale to the first, or the other way round, that counts as growing."""
_ALONG = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}


def grade(frames: np.ndarray, clip: Clip) -> list[Fault]:
    """The faults of uint8 frames [F, 64, 64, 3] of the clip; empty if it is fully right."""
    if frames.shape[1:] != (CANVAS, CANVAS, 3) or frames.dtype != np.uint8:
        raise ValueError(f"frames are {frames.dtype} {frames.shape}; uint8 (F, 64, 64, 3) is read")
    seen = [_detect(frame) for frame in frames]
    faults = _of_frames(seen, clip)
    shapes = [(index, found[0]) for index, (_, found) in enumerate(seen) if found]
    if len(shapes) < max(2, len(frames) - WRONG_FRAMES):
        return faults
    return faults + _of_track(shapes, clip)


def _detect(frame: np.ndarray) -> tuple[str, list[Found]]:
    """Background and shapes, scales and places in the frame's own pixels, the best match first."""
    large = Image.fromarray(frame).resize((PICTURE, PICTURE), Image.Resampling.BILINEAR)
    background, found = detect(np.asarray(large))
    ratio = CANVAS / PICTURE
    own = [
        Found(f.kind, f.colour, f.scale * ratio, f.x * ratio, f.y * ratio, f.match) for f in found
    ]
    return background, sorted(own, key=lambda each: -each.scale)


def _of_frames(seen: list[tuple[str, list[Found]]], clip: Clip) -> list[Fault]:
    wrong: dict[str, list[str]] = {}
    for number, (background, found) in enumerate(seen):
        if background != clip.background:
            wrong.setdefault("background", []).append(f"{background} in frame {number}")
        if not found:
            wrong.setdefault("missing", []).append(f"nothing in frame {number}")
            continue
        shape, *rest = found
        if rest:
            wrong.setdefault("extra", []).append(f"{len(found)} shapes in frame {number}")
        if shape.colour != clip.colour:
            wrong.setdefault("colour", []).append(f"{shape.colour} in frame {number}")
        if shape.kind != clip.kind:
            wrong.setdefault("kind", []).append(f"{shape.kind} in frame {number}")
        elif shape.match < LEAST_MATCH:
            wrong.setdefault("malformed", []).append(f"overlap {shape.match:.2f} in {number}")
    return [
        Fault(sort, f"{details[0]}, {len(details)} frames")
        for sort, details in wrong.items()
        if len(details) > WRONG_FRAMES
    ]


def _of_track(shapes: list[tuple[int, Found]], clip: Clip) -> list[Fault]:
    """Faults of size and motion, by straight lines through what was found."""
    frame = np.array([index for index, _ in shapes], dtype=float)
    last = frame.max()
    values = np.array([(shape.x, shape.y, shape.scale) for _, shape in shapes])
    slope, start = np.polyfit(frame, values, 1)
    step = slope[:2] * last
    first, end = start[2] + slope[2] * frame.min(), start[2] + slope[2] * last
    growth = end / max(first, 1e-3)
    faults = []
    if clip.motion in _ALONG:
        way = np.array(_ALONG[clip.motion], dtype=float)
        along, across = float(step @ way), float(np.abs(step @ way[::-1]))
        if along < LEAST_TRAVEL or across > max(DRIFT, along / 3):
            faults.append(Fault("motion", f"({step[0]:.0f},{step[1]:.0f}), not {clip.motion}"))
        elif (np.diff(values[:, :2] @ way) < -2.0).any():
            faults.append(Fault("motion", f"goes back on its way {clip.motion}"))
    elif np.abs(step).max() > DRIFT:
        faults.append(Fault("motion", f"({step[0]:.0f},{step[1]:.0f}), not {clip.motion}"))
    wanted = {"growing": growth, "shrinking": 1 / growth}.get(clip.motion)
    if wanted is None:
        if not 1 / GROWTH < growth < GROWTH:
            faults.append(Fault("motion", f"grows {growth:.2f} times"))
    elif wanted < GROWTH:
        faults.append(Fault("motion", f"scale {first:.1f} to {end:.1f}, not {clip.motion}"))
    scale = float(np.median(values[:, 2]))
    too_large = clip.size == "small" and scale > SIZE_BORDER + SIZE_TOLERANCE
    too_small = clip.size == "large" and scale < SIZE_BORDER - SIZE_TOLERANCE
    if too_large or too_small:
        faults.append(Fault("size", f"scale {scale:.1f}, not {clip.size}"))
    return faults
