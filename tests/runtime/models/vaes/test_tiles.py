"""Tiles cover everything once blended, and leave out what would add nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.multimodal_gen.runtime.models.vaes.tiles import (
    TileAxis,
    TileGrid,
    TilePlan,
    blend,
)


@st.composite
def axes(draw, most=40):
    tile = draw(st.integers(1, 12))
    return TileAxis(draw(st.integers(1, most)), tile, draw(st.integers(1, tile)))


@settings(deadline=None)
@given(axis=axes())
def test_tiles_cover_an_axis_and_none_lies_within_the_one_before(axis):
    covered = {i for s in axis.starts for i in range(s, s + axis.length(s))}
    assert covered == set(range(axis.size))
    ends = [s + axis.length(s) for s in axis.starts]
    assert ends == sorted(set(ends))
    assert all(axis.length(s) == axis.tile for s in axis.starts[:-1])
    assert all(axis.length(s) > axis.overlap for s in axis.starts[1:])


@settings(deadline=None)
@given(rows=axes(20), columns=axes(20), up=st.integers(1, 3))
def test_tiles_of_a_map_join_to_the_map(rows, columns, up):
    grid = TileGrid(rows, columns)
    x = torch.randn(1, 2, rows.size, columns.size, dtype=torch.float64)
    tiles = grid.cut(x)
    assert len(tiles) == len(grid)
    larger = [t.repeat_interleave(up, -1).repeat_interleave(up, -2) for t in tiles]
    kept = [tile.clone() for tile in larger]
    joined = grid.scaled(up, 1).join(iter(larger))
    assert torch.allclose(joined, x.repeat_interleave(up, -1).repeat_interleave(up, -2))
    assert all(map(torch.equal, larger, kept)), "the tiles are not changed"


@settings(deadline=None)
@given(frames=axes(20), rows=axes(8), ratio=st.integers(1, 4))
def test_pieces_of_time_join_to_the_clip(frames, rows, ratio):
    """A causal decoder without memory: the first latent is a frame, each other ``ratio``."""
    plan = TilePlan(TileGrid(rows, TileAxis(3, 3, 3)), frames)
    z = torch.randn(1, 2, 1 + frames.size, rows.size, 3, dtype=torch.float64)

    def decode(x):
        return torch.cat((x[:, :, :1], x[:, :, 1:].repeat_interleave(ratio, 2)), 2)

    results = plan.scaled((1, 1), (ratio, 1))
    tiles = [decode(tile) for tile in plan.cut(z)]
    assert [tuple(tile.shape) for tile in tiles] == results.shapes(tiles[0])
    joined = results.join(tiles)
    assert tuple(joined.shape) == results.shape(tiles[0])
    assert torch.allclose(joined, decode(z))


def test_neighbours_pass_into_each_other_along_a_line():
    grid = TileGrid(TileAxis(6, 4, 2), TileAxis(1, 1, 1))
    ones, fives = torch.ones(1, 1, 4, 1), torch.full((1, 1, 4, 1), 5.0)
    joined = grid.join(iter((ones, fives))).flatten()
    assert joined.tolist() == [1, 1, 1, 3, 5, 5]


def test_a_corner_mixes_all_four():
    grid = TileGrid(TileAxis(3, 2, 1), TileAxis(3, 2, 1))
    tiles = [torch.full((1, 1, 2, 2), float(v)) for v in (1, 2, 4, 8)]
    # With an overlap of one, the tile that came before wins: the upper left one at the corner.
    assert grid.join(iter(tiles))[0, 0].tolist() == [[1, 1, 2], [1, 1, 2], [4, 4, 8]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_blended_in_float32(dtype):
    before, after = (torch.full((1, 1, 7, 1), v, dtype=dtype) for v in (100.0, 101.0))
    expected = [(100 * (1 - i / 7) + 101 * (i / 7)) for i in range(7)]
    found = blend(before, after.clone(), 7, -2).flatten()
    assert torch.equal(found, torch.tensor(expected).to(dtype))
