"""The grader: does a picture show what its scene says? By image analysis, no network.

A picture is *right* if the background has its colour, every shape of the scene is there with its
kind, colour, size and place, every relation holds, and nothing else is there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from examples.train_demo_model.layout import CANVAS, SIZE_BORDER
from examples.train_demo_model.render import PALETTE_RGB, coverage, distances
from examples.train_demo_model.scenes import KINDS, PALETTE, POSITIONS, Scene, Shape

COLOURS = tuple(PALETTE)
BORDER_WIDTH = 2
LEAST_CORE = 12
"""Pixels that remain of a shape when its rim is taken off; less is dirt or the rim of another."""
LEAST_DIRT = 40
"""Pixels of a stray spot that make it a fault."""
LEAST_MATCH = 0.80
"""Overlap (intersection over union) with the best template, under which a shape is malformed."""
WRONG_COLOUR_DISTANCE = 60.0
"""Mean distance from the palette's colour (0..255, Euclidean) that is a fault."""
SIZE_TOLERANCE = 0.75
"""Pixels of scale by which a size may miss its border."""


@dataclass(frozen=True, slots=True)
class Found:
    """A shape found in a picture."""

    kind: str
    colour: str
    scale: float
    """Of the template with the same area, pixels."""
    x: float
    y: float
    match: float
    """Overlap with the template, 0..1."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: its sort (for tables) and what was seen."""

    sort: str
    detail: str


def grade(image: np.ndarray, scene: Scene) -> list[Fault]:
    """The faults of an RGB uint8 picture [128, 128, 3] of the scene; empty if it is fully right."""
    background, found = detect(image)
    faults: list[Fault] = []
    if background != scene.background:
        faults.append(Fault("background", f"{background}, not {scene.background}"))
    by_colour: dict[str, list[Found]] = {}
    for shape in found:
        by_colour.setdefault(shape.colour, []).append(shape)

    placed: list[Found | None] = []
    for wanted in scene.shapes:
        candidates = by_colour.get(wanted.colour, [])
        best = max(candidates, key=lambda f: (f.kind == wanted.kind, f.match), default=None)
        placed.append(best)
        if best is None:
            faults.append(Fault("missing", f"no {wanted.colour} shape"))
            continue
        candidates.remove(best)
        faults += _compare(best, wanted)
    for rest in by_colour.values():
        faults += [Fault("extra", f"{shape.colour} {shape.kind}") for shape in rest]

    for i, relation in enumerate(scene.relations):
        first, second = placed[i], placed[i + 1]
        if first is not None and second is not None and not _holds(first, relation, second):
            where = f"({first.x:.0f},{first.y:.0f}) and ({second.x:.0f},{second.y:.0f})"
            faults.append(Fault("relation", f"not {relation}: {where}"))
    return faults


def detect(image: np.ndarray) -> tuple[str, list[Found]]:
    """The background's colour and the shapes of an RGB uint8 picture [128, 128, 3]."""
    if image.shape != (CANVAS, CANVAS, 3) or image.dtype != np.uint8:
        raise ValueError(
            f"image is {image.dtype} {image.shape}; the grader reads uint8 (128, 128, 3)"
        )
    pixels = image.astype(np.float32)
    palette = PALETTE_RGB.astype(np.float32)
    nearest = _nearest(pixels, palette)
    rim = np.ones((CANVAS, CANVAS), bool)
    rim[BORDER_WIDTH:-BORDER_WIDTH, BORDER_WIDTH:-BORDER_WIDTH] = False
    background = int(np.bincount(nearest[rim], minlength=len(palette)).argmax())

    # Blends along edges look like third colours (red on white: pink). They are thin: only colours
    # that survive erosion somewhere compete for the pixels.
    solid = [
        index
        for index in range(len(palette))
        if index == background or _erode(nearest == index).sum() >= LEAST_CORE
    ]
    label = np.array(solid)[_nearest(pixels, palette[solid])]
    found: list[Found] = []
    for index in solid:
        if index == background:
            continue
        mask = label == index
        core = _erode(mask)
        for part in components(mask):
            if core[part].sum() >= LEAST_CORE or (
                len(part[0]) >= LEAST_DIRT and not _is_rim(part, label, index, background)
            ):
                found.append(_classify(part, index, pixels))
    return COLOURS[background], found


def components(mask: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """The 4-connected parts of a mask, each as row and column indices; union of runs of pixels."""
    padded = np.zeros((mask.shape[0], mask.shape[1] + 2), np.int8)
    padded[:, 1:-1] = mask
    edge = np.diff(padded, axis=1)
    rows, starts = np.nonzero(edge == 1)
    stops = np.nonzero(edge == -1)[1]
    parent = list(range(len(rows)))

    def root(run: int) -> int:
        while parent[run] != run:
            parent[run] = parent[parent[run]]
            run = parent[run]
        return run

    first_of_row = np.searchsorted(rows, np.arange(mask.shape[0] + 1))
    for run, row in enumerate(rows):
        if row == 0:
            continue
        for above in range(first_of_row[row - 1], first_of_row[row]):
            if starts[above] < stops[run] and starts[run] < stops[above]:
                parent[root(run)] = root(above)
    runs_of: dict[int, list[int]] = {}
    for run in range(len(rows)):
        runs_of.setdefault(root(run), []).append(run)
    return [
        (
            np.concatenate([np.full(stops[r] - starts[r], rows[r]) for r in runs]),
            np.concatenate([np.arange(starts[r], stops[r]) for r in runs]),
        )
        for runs in runs_of.values()
    ]


def _nearest(pixels: np.ndarray, palette: np.ndarray) -> np.ndarray:
    """Index of the nearest colour of each pixel: least |p - c|^2, without its term |p|^2."""
    return ((palette**2).sum(-1) - 2 * pixels @ palette.T).argmin(-1)


def _erode(mask: np.ndarray) -> np.ndarray:
    """The mask without its rim of one pixel (3 x 3 neighbourhood)."""
    result = mask.copy()
    for axis in (0, 1):
        inner = result.copy()
        for shift in (1, -1):
            inner &= np.roll(result, shift, axis)
        result = inner
    result[[0, -1], :] = False
    result[:, [0, -1]] = False
    return result


def _is_rim(
    part: tuple[np.ndarray, np.ndarray], label: np.ndarray, index: int, background: int
) -> bool:
    """True if a thin part lies along another shape: most of its pixels touch a third colour."""
    third = (label != index) & (label != background)
    near = third.copy()
    for axis in (0, 1):
        for shift in (1, -1):
            near |= np.roll(third, shift, axis)
    return bool(near[part].mean() > 0.5)


@cache
def _template_areas() -> tuple[float, ...]:
    """Area of each kind at scale 1."""
    line = torch.linspace(-1.5, 1.5, 1201)
    y, x = torch.meshgrid(line, line, indexing="ij")
    return tuple(float((d < 0).double().mean()) * 9.0 for d in distances(x, y))


def _classify(part: tuple[np.ndarray, np.ndarray], colour: int, pixels: np.ndarray) -> Found:
    """The kind whose template, with the part's area and centroid, overlaps the part best."""
    rows, columns = part
    area = len(rows)
    x, y = float(columns.mean()) + 0.5, float(rows.mean()) + 0.5
    half = max(np.ptp(rows), np.ptp(columns)) // 2 + 6
    left, top = math.floor(x) - half, math.floor(y) - half
    window = np.zeros((2 * half + 1, 2 * half + 1), bool)
    inside = (abs(rows - top - half) <= half) & (abs(columns - left - half) <= half)
    window[rows[inside] - top, columns[inside] - left] = True

    scales = torch.tensor([math.sqrt(area / unit) for unit in _template_areas()])
    centre = torch.tensor([x - left, y - top]).expand(len(KINDS), 2)
    templates = coverage(torch.arange(len(KINDS)), scales, centre, size=2 * half + 1).numpy() > 0.5
    common = (templates & window).sum((1, 2))
    overlap = common / (templates | window).sum((1, 2)).clip(1)
    best = int(overlap.argmax())

    core = _erode(window)
    off = np.zeros(1)
    if core.any():
        core_rows, core_columns = np.nonzero(core)
        seen = pixels[core_rows + top, core_columns + left]
        off = np.linalg.norm(seen - PALETTE_RGB[colour], axis=-1)
    match = float(overlap[best]) if off.mean() < WRONG_COLOUR_DISTANCE else 0.0
    return Found(KINDS[best], COLOURS[colour], float(scales[best]), x, y, match)


def _compare(found: Found, wanted: Shape) -> list[Fault]:
    faults: list[Fault] = []
    name = f"{wanted.colour} {wanted.kind}"
    if found.kind != wanted.kind:
        faults.append(Fault("kind", f"{name}: looks like a {found.kind} ({found.match:.2f})"))
    elif found.match < LEAST_MATCH:
        faults.append(Fault("malformed", f"{name}: overlap {found.match:.2f}"))
    too_large = wanted.size == "small" and found.scale > SIZE_BORDER + SIZE_TOLERANCE
    too_small = wanted.size == "large" and found.scale < SIZE_BORDER - SIZE_TOLERANCE
    if too_large or too_small:
        faults.append(Fault("size", f"{name}: scale {found.scale:.1f}, not {wanted.size}"))
    if wanted.position:
        third = CANVAS / 3
        cell = min(int(found.y / third), 2) * 3 + min(int(found.x / third), 2)
        if POSITIONS[cell] != wanted.position:
            faults.append(Fault("position", f"{name}: {POSITIONS[cell]}, not {wanted.position}"))
    return faults


def _holds(first: Found, relation: str, second: Found) -> bool:
    """True if the second lies in the relation's quarter, more along it than across."""
    right, down = first.x - second.x, first.y - second.y
    along = {"above": -down, "below": down, "left of": -right, "right of": right}[relation]
    across = abs(right) if relation in ("above", "below") else abs(down)
    return along > across
