"""Bands of rows: who holds what, and that ranks find together what one would."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.row_shard import (
    RowShards,
    attend_to_all_rows,
    split_evenly,
)
from thread_ranks import run_threads


@settings(deadline=None)
@given(total=st.integers(1, 500), parts=st.integers(1, 16))
def test_bands_cover_all_rows_and_differ_by_one_at_most(total, parts):
    bands = split_evenly(total, parts)
    assert sum(bands) == total
    assert len(bands) == parts
    assert max(bands) - min(bands) <= 1
    assert list(bands) == sorted(bands, reverse=True)


def test_bands_must_be_one_a_rank_and_none_empty():
    shards = RowShards(Group("one"))
    for bands in ((), (0,), (1, 1)):
        with pytest.raises(ValueError, match="no bands of rows for 1 ranks"), shards.holding(bands):
            pass
    with shards.holding((3,)):
        assert shards.active
    assert not shards.active


def test_bands_end_with_an_error_too():
    shards = RowShards(Group("one"))
    with pytest.raises(KeyError), shards.holding((3,)):
        raise KeyError
    assert not shards.active


@settings(deadline=None)
@given(
    ranks=st.integers(1, 5),
    extra=st.integers(0, 6),
    scale=st.integers(1, 3),
    above=st.integers(0, 1),
    below=st.integers(0, 1),
)
def test_edges_are_the_neighbours_rows(ranks, extra, scale, above, below):
    height = ranks + extra
    whole = torch.arange(2.0 * height * scale * 3).view(1, 2, height * scale, 3)
    bands = split_evenly(height, ranks)

    def rank(group):
        shards = RowShards(group)
        with shards.holding(bands):
            mine = shards.mine(whole, scale)
            edges = shards.exchange_edges(mine, above, below)
            edges.wait()
            top = sum(bands[: group.rank]) * scale
            bottom = top + mine.shape[-2]
            if above and group.rank > 0:
                assert torch.equal(edges.above, whole[:, :, top - above : top])
            else:
                assert edges.above is None
            if below and group.rank < ranks - 1:
                assert torch.equal(edges.below, whole[:, :, bottom : bottom + below])
            else:
                assert edges.below is None
            assert torch.equal(shards.everyones(mine), whole)
            first = shards.on_first(mine)
            assert torch.equal(first, whole) if group.is_first else len(first) == 0

    run_threads(ranks, rank)


@settings(deadline=None)
@given(ranks=st.integers(1, 5), extra=st.integers(0, 6), offset=st.sampled_from([0.0, 1e3]))
def test_moments_are_those_of_all_rows_far_from_zero_too(ranks, extra, offset):
    height = ranks + extra
    whole = torch.randn(2, 3, height, 5, generator=torch.Generator().manual_seed(height)) + offset
    variance, mean = torch.var_mean(whole.double(), (2, 3), correction=0)

    def rank(group):
        shards = RowShards(group)
        with shards.holding(split_evenly(height, ranks)):
            own_variance, own_mean = torch.var_mean(shards.mine(whole), (2, 3), correction=0)
            return shards.whole_moments(own_mean, own_variance)

    found = run_threads(ranks, rank)
    for found_mean, found_variance in found:
        assert torch.allclose(found_mean.double(), mean, rtol=1e-6, atol=1e-6)
        # Squares of numbers near 1000 less their mean would be off by a tenth.
        assert torch.allclose(found_variance.double(), variance, rtol=2e-3)
        assert torch.equal(found_mean, found[0][0])
        assert torch.equal(found_variance, found[0][1])


@pytest.mark.parametrize("bands", [(2, 2), (3, 2, 2)])
def test_attention_sees_all_rows_and_computes_its_own(bands):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, sum(bands) * 3, 4, generator=generator) for _ in range(3))
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def rank(group):
        shards = RowShards(group)
        tokens = slice(3 * sum(bands[: group.rank]), 3 * sum(bands[: group.rank + 1]))
        with shards.holding(bands):
            out = attend_to_all_rows(*(x[:, :, tokens] for x in (q, k, v)), shards)
        assert out.shape[2] == 3 * bands[group.rank]
        alone = torch.nn.functional.scaled_dot_product_attention(
            *(x[:, :, tokens] for x in (q, k, v))
        )
        assert (alone - whole[:, :, tokens]).norm() > 0.1 * whole.norm(), "it must matter"
        assert torch.allclose(out, whole[:, :, tokens], atol=1e-6)
        assert group.traffic == {"all_gather": 1}

    run_threads(len(bands), rank)
