"""Overlapping tiles of a picture or clip: where they lie, and how their results become one.

Tiles start every ``stride``; what neighbours share is blended along a line, as in Diffusers' tiled
VAEs. One difference: a tile that lies wholly within the one before it is left out. It would add a
result with less context at the picture's edge, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.layers.row_shard import ROWS

FRAMES = -3
"""The dimension of frames in a clip [B, C, T, H, W]."""


@dataclass(frozen=True, slots=True)
class TileAxis:
    """Tiles along one axis: ``tile`` long, one every ``stride``, until ``size`` is covered."""

    size: int
    tile: int
    stride: int

    @property
    def starts(self) -> tuple[int, ...]:
        """Where tiles begin; all but the last are whole."""
        starts = [0]
        while starts[-1] + self.tile < self.size:
            starts.append(starts[-1] + self.stride)
        return tuple(starts)

    @property
    def overlap(self) -> int:
        """What a tile shares with the next."""
        return self.tile - self.stride

    def length(self, start: int) -> int:
        """How long the tile at ``start`` is."""
        return min(self.tile, self.size - start)

    def scaled(self, up: int, down: int) -> TileAxis:
        """The same tiles in a map of another scale."""
        return TileAxis(self.size * up // down, self.tile * up // down, self.stride * up // down)


@dataclass(frozen=True, slots=True)
class TileGrid:
    """Tiles over the last two dimensions, row by row."""

    rows: TileAxis
    columns: TileAxis

    def __len__(self) -> int:
        return len(self.rows.starts) * len(self.columns.starts)

    def boxes(self) -> Iterator[tuple[int, int, int, int]]:
        """Top, left, height and width of each tile."""
        for top in self.rows.starts:
            for left in self.columns.starts:
                yield top, left, self.rows.length(top), self.columns.length(left)

    def cut(self, x: Tensor) -> list[Tensor]:
        """The tiles of ``x`` [..., H, W], as views."""
        return [
            x[..., top : top + height, left : left + width]
            for top, left, height, width in self.boxes()
        ]

    def scaled(self, up: int, down: int) -> TileGrid:
        """The same tiles in a map of another scale."""
        return TileGrid(self.rows.scaled(up, down), self.columns.scaled(up, down))

    def join(self, tiles: Iterator[Tensor]) -> Tensor:
        """One map of the next tiles, overlaps blended; the tiles are not changed."""
        whole: Tensor | None = None
        last_row: list[Tensor] = []
        for top, left, height, width in self.boxes():
            tile = next(tiles).clone()
            if whole is None:
                whole = tile.new_empty(*tile.shape[:-2], self.rows.size, self.columns.size)
            column = left // self.columns.stride
            if top > 0:
                blend(last_row[column], tile, self.rows.overlap, ROWS)
            if left > 0:
                # The left one is blended already: a corner is a mixture of all four.
                blend(last_row[column - 1], tile, self.columns.overlap, -1)
            last_row[column : column + 1] = [tile]
            whole[..., top : top + height, left : left + width] = tile
        assert whole is not None, "a grid has a tile"
        return whole


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Tiles of a picture, or of a clip in pieces of time.

    ``frames`` counts the frames after the first, for a causal autoencoder: the first frame stands
    alone in its latents, and each piece of time takes the frame before it along, whose result is
    dropped (but for the first piece).
    """

    grid: TileGrid
    frames: TileAxis | None = None

    def __len__(self) -> int:
        return len(self.grid) * len(self._starts)

    def cut(self, x: Tensor) -> list[Tensor]:
        """All tiles, one piece of time after the other, as views."""
        if self.frames is None:
            return self.grid.cut(x)
        pieces = (x.narrow(FRAMES, s, 1 + self.frames.length(s)) for s in self._starts)
        return [tile for piece in pieces for tile in self.grid.cut(piece)]

    def scaled(self, space: tuple[int, int], time: tuple[int, int]) -> TilePlan:
        """The plan of the results; each scale is (up, down)."""
        frames = None if self.frames is None else self.frames.scaled(*time)
        return TilePlan(self.grid.scaled(*space), frames)

    def shapes(self, like: Tensor) -> list[tuple[int, ...]]:
        """Every tile's shape; batch, channels and frames that are not cut are as in ``like``."""
        times = [like.shape[2:-2]] if self.frames is None else [
            (1 + self.frames.length(s),) for s in self._starts
        ]  # fmt: skip
        return [
            (*like.shape[:2], *time, height, width)
            for time in times
            for _, _, height, width in self.grid.boxes()
        ]

    def shape(self, like: Tensor) -> tuple[int, ...]:
        """The shape of the whole; batch, channels and frames that are not cut as in ``like``."""
        time = like.shape[2:-2] if self.frames is None else (1 + self.frames.size,)
        return (*like.shape[:2], *time, self.grid.rows.size, self.grid.columns.size)

    def join(self, tiles: Iterable[Tensor]) -> Tensor:
        """The whole of all tiles in order, blended. ``tiles`` may be computed as they are taken."""
        rest = iter(tiles)
        if self.frames is None:
            return self.grid.join(rest)
        pieces: list[Tensor] = []
        for start in self._starts:
            piece = self.grid.join(rest)
            if start > 0:
                piece = piece.narrow(FRAMES, 1, piece.shape[FRAMES] - 1)
                blend(pieces[-1], piece, self.frames.overlap, FRAMES)
                pieces[-1] = pieces[-1].narrow(
                    FRAMES, 0, pieces[-1].shape[FRAMES] - self.frames.overlap
                )
            pieces.append(piece)
        return torch.cat(pieces, FRAMES)

    @property
    def _starts(self) -> tuple[int, ...]:
        return (0,) if self.frames is None else self.frames.starts


def blend(before: Tensor, after: Tensor, extent: int, dim: int) -> Tensor:
    """Write into the first ``extent`` of ``after`` a passage from the last of ``before``.

    Position i is ``before * (1 - i / extent) + after * (i / extent)``, in float32 or better.
    """
    extent = min(before.shape[dim], after.shape[dim], extent)
    if extent == 0:
        return after
    dtype = torch.promote_types(after.dtype, torch.float32)
    shape = [1] * after.ndim
    shape[dim] = extent
    coming = (torch.arange(extent, dtype=torch.float64) / extent).view(shape)
    fading = (1 - coming).to(after.device, dtype)
    end = before.narrow(dim, before.shape[dim] - extent, extent).to(dtype)
    start = after.narrow(dim, 0, extent)
    start.copy_(end * fading + start.to(dtype) * coming.to(after.device, dtype))
    return after
