"""Layouts: where the shapes of a scene stand, and how large each is, in pixels.

Vectorised over scenes with numpy: proposals are drawn for all scenes at once, and those that do
not fit are drawn again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from examples.train_demo_model.scenes import KINDS, PALETTE, POSITIONS, RELATIONS, Scene

CANVAS = 128
MARGIN = 2.0
"""Pixels kept free at each edge of the canvas."""
GAP = 4.0
"""Least pixels between the boxes of two shapes."""
SIZE_RANGE = {"small": (10.0, 11.5), "large": (16.0, 19.5), "": (10.0, 19.5)}
"""The scale ``s`` of a shape in pixels: a circle's radius, and alike for the others."""
SIZE_BORDER = 13.75
"""Scales under it are small, scales over it are large."""

EXTENTS: dict[str, tuple[float, float, float]] = {
    "circle": (1.0, 1.0, 1.0),
    "square": (0.9, 0.9, 0.9),
    "triangle": (1.15, 1.34, 0.67),
    "star": (1.142, 1.2, 0.971),
    "cross": (1.1, 1.1, 1.1),
}
"""Half width, reach upwards and reach downwards from the centroid, in units of the scale."""

_DIRECTIONS = np.array([[0, -1], [0, 1], [-1, 0], [1, 0]], dtype=np.float32)
_REACH = np.array([EXTENTS[kind] for kind in KINDS], dtype=np.float32)
_COLOUR_INDEX = {name: i for i, name in enumerate(PALETTE)}


class Layout(NamedTuple):
    """Placed scenes, as arrays over B scenes of up to three shapes; kind -1 is no shape."""

    background: np.ndarray
    """[B] int8, index into the palette."""
    kind: np.ndarray
    """[B, 3] int8."""
    colour: np.ndarray
    """[B, 3] int8."""
    scale: np.ndarray
    """[B, 3] float32, pixels."""
    centre: np.ndarray
    """[B, 3, 2] float32, x then y of the centroid, pixels from the top left corner."""

    def take(self, index: slice | np.ndarray) -> Layout:
        """Some of the scenes."""
        return Layout(*(field[index] for field in self))


def place(scenes: list[Scene], rng: np.random.Generator) -> Layout:
    """A random layout of each scene, in which all its words are true and no shapes overlap."""
    count = len(scenes)
    kind = np.full((count, 3), -1, np.int8)
    colour = np.zeros((count, 3), np.int8)
    cell = np.full((count, 3), -1, np.int8)
    relation = np.full((count, 2), -1, np.int8)
    size_range = np.zeros((count, 3, 2), np.float32)
    for row, scene in enumerate(scenes):
        for i, shape in enumerate(scene.shapes):
            kind[row, i] = KINDS.index(shape.kind)
            colour[row, i] = _COLOUR_INDEX[shape.colour]
            size_range[row, i] = SIZE_RANGE[shape.size]
            cell[row, i] = POSITIONS.index(shape.position) if shape.position else -1
        for i, name in enumerate(scene.relations):
            relation[row, i] = RELATIONS.index(name)
    background = np.array([_COLOUR_INDEX[scene.background] for scene in scenes], np.int8)

    scale = np.zeros((count, 3), np.float32)
    centre = np.zeros((count, 3, 2), np.float32)
    open_rows = np.arange(count)
    for attempt in range(2000):
        lots = _Lots(kind[open_rows], cell[open_rows], relation[open_rows], size_range[open_rows])
        # Roomy distances first; after some refusals closer ones, which crowded scenes need.
        spread = 30.0 / (1 + attempt / 8)
        new_scale, new_centre, fits = lots.propose(rng, spread)
        scale[open_rows[fits]] = new_scale[fits]
        centre[open_rows[fits]] = new_centre[fits]
        open_rows = open_rows[~fits]
        if not len(open_rows):
            return Layout(background, kind, colour, scale, centre)
    raise AssertionError(f"no layout found for {scenes[open_rows[0]]}")


class _Lots:
    """One round of proposals for the scenes that still lack a layout."""

    def __init__(
        self, kind: np.ndarray, cell: np.ndarray, relation: np.ndarray, size_range: np.ndarray
    ) -> None:
        self.kind, self.cell, self.relation, self.size_range = kind, cell, relation, size_range
        self.present = kind >= 0

    def propose(
        self, rng: np.random.Generator, spread: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scales [B, 3], centres [B, 3, 2] and which rows fit [B]."""
        low, high = self.size_range[..., 0], self.size_range[..., 1]
        scale = low + (high - low) * rng.random(low.shape, dtype=np.float32)
        reach = _REACH[self.kind] * scale[..., None]
        half_width, up, down = reach[..., 0], reach[..., 1], reach[..., 2]
        least = np.stack((half_width, up), -1) + MARGIN
        most = CANVAS - np.stack((half_width, down), -1) - MARGIN

        centre = least + (most - least) * rng.random(least.shape, dtype=np.float32)
        self._into_cells(rng, centre, least, most)
        fits = self._chain(rng, centre, reach, spread)
        inside = ((centre >= least - 1e-3) & (centre <= most + 1e-3)).all(-1)
        fits &= (inside | ~self.present).all(-1)
        for i, j in ((0, 1), (0, 2), (1, 2)):
            fits &= self._apart(centre, reach, i, j) | ~self.present[:, j]
        return scale, centre, fits

    def _into_cells(
        self, rng: np.random.Generator, centre: np.ndarray, least: np.ndarray, most: np.ndarray
    ) -> None:
        """Moves shapes with absolute positions into their cells."""
        placed = self.cell >= 0
        for axis, part in ((0, self.cell % 3), (1, self.cell // 3)):
            low = np.where(part == 0, least[..., axis], np.where(part == 1, 54.0, 92.0))
            high = np.where(part == 0, 36.0, np.where(part == 1, 74.0, most[..., axis]))
            chosen = low + (high - low) * rng.random(low.shape, dtype=np.float32)
            centre[..., axis] = np.where(placed, chosen, centre[..., axis])

    def _chain(
        self, rng: np.random.Generator, centre: np.ndarray, reach: np.ndarray, spread: float
    ) -> np.ndarray:
        """Moves chained shapes so that each stands as related to the one before; rows that fit."""
        fits = np.ones(len(centre), bool)
        related = self.relation[:, 0] >= 0
        for i in range(2):
            active = self.relation[:, i] >= 0
            # Shape i stands `relation` shape i + 1: the next one lies the opposite way.
            direction = -_DIRECTIONS[self.relation[:, i]]
            sideways = direction[:, ::-1] * rng.uniform(-0.45, 0.45, (len(centre), 1))
            toward = _reach_along(reach[:, i], direction)
            back = _reach_along(reach[:, i + 1], -direction)
            gap = GAP + spread * rng.random(len(centre))
            distance = (toward + back + gap)[:, None]
            step = centre[:, i] + (direction + sideways) * distance
            centre[:, i + 1] = np.where(active[:, None], step, centre[:, i + 1])

        # The chain as a whole goes anywhere it fits on the canvas.
        low = centre - np.stack((reach[..., 0], reach[..., 1]), -1)
        high = centre + np.stack((reach[..., 0], reach[..., 2]), -1)
        low = np.where(self.present[..., None], low, np.inf).min(1)
        high = np.where(self.present[..., None], high, -np.inf).max(1)
        free = CANVAS - 2 * MARGIN - (high - low)
        fits &= (free >= 0).all(-1) | ~related
        shift = MARGIN - low + free * rng.random(free.shape, dtype=np.float32)
        centre += np.where(related[:, None], shift, 0.0)[:, None, :]
        return fits

    @staticmethod
    def _apart(centre: np.ndarray, reach: np.ndarray, i: int, j: int) -> np.ndarray:
        """True where the boxes of shapes i and j keep the gap along x or along y."""
        between = centre[:, j] - centre[:, i]
        apart_x = np.abs(between[:, 0]) >= reach[:, i, 0] + reach[:, j, 0] + GAP - 1e-3
        # Downwards from i to j: i reaches down, j reaches up; upwards the other way round.
        tall = np.where(
            between[:, 1] > 0, reach[:, i, 2] + reach[:, j, 1], reach[:, i, 1] + reach[:, j, 2]
        )
        return apart_x | (np.abs(between[:, 1]) >= tall + GAP - 1e-3)


def _reach_along(reach: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """How far a shape reaches along an axis-parallel direction [B, 2]."""
    vertical = np.where(direction[:, 1] > 0, reach[:, 2], reach[:, 1])
    return np.where(direction[:, 0] != 0, reach[:, 0], vertical)
