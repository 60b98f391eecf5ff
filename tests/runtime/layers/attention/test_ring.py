"""Merging parts of an attention gives the attention over all keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.attention.backends import with_lse
from sglang.multimodal_gen.runtime.layers.attention.backends.with_lse import attend_with_lse
from sglang.multimodal_gen.runtime.layers.attention.ring import Piece, merge, ring_attention
from sglang.multimodal_gen.runtime.layers.sequence_shard import Run


def parts_of(q, k, v, cuts, mask=None):
    ends = [*cuts, k.shape[1]]
    for start, end in zip([0, *cuts], ends, strict=True):
        own = None if mask is None else mask[..., start:end]
        yield attend_with_lse(q, k[:, start:end], v[:, start:end], mask=own, causal=False)


def merged(parts):
    parts = list(parts)
    result = parts[0]
    for part in parts[1:]:
        result = merge(result, part)
    return result


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 11), min_size=1, max_size=4, unique=True), st.floats(0.01, 300))
def test_any_cut_of_the_keys_merges_to_the_whole(cuts, sharpness):
    generator = torch.Generator().manual_seed(len(cuts))
    q, k, v = (torch.randn(2, 5, 3, 8, generator=generator).double() for _ in range(3))
    k, v = k.repeat(1, 3, 1, 1)[:, :12], v.repeat(1, 3, 1, 1)[:, :12]
    k = k + 0.1 * torch.randn(k.shape, generator=generator)
    q = q * sharpness
    whole, lse = attend_with_lse(q, k, v, mask=None, causal=False)
    # In the merge's own precision, and in the one that it has in use.
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 3e-5)):
        out, found = merged(parts_of(*(x.to(dtype) for x in (q, k, v)), sorted(cuts)))
        assert ((out - whole).norm() / whole.norm()).item() < limit
        assert ((found - lse).norm() / lse.norm()).item() < limit


def test_parts_that_a_query_does_not_see_have_no_weight():
    q, k, v = (torch.randn(2, 6, 3, 8).double() for _ in range(3))
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    mask[0, ..., :2] = False
    mask[1, ..., 2:] = False
    whole, lse = attend_with_lse(q, k, v, mask=mask, causal=False)
    out, found = merged(parts_of(q, k, v, [2, 4], mask))
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(found, lse)


def test_what_no_part_shows_stays_zero():
    nothing = torch.zeros(1, 2, 1, 4), torch.full((1, 2, 1), -torch.inf)
    out, lse = merge(nothing, nothing)
    assert not out.any()
    assert torch.isneginf(lse).all()


def test_a_mean_is_no_merge():
    q, k, v = (torch.randn(2, 6, 3, 8) for _ in range(3))
    (a, _), (b, _) = parts_of(q, k, v, [2])
    whole, _ = attend_with_lse(q, k, v, mask=None, causal=False)
    with pytest.raises(AssertionError):
        torch.testing.assert_close((a + b) / 2, whole)


@pytest.mark.parametrize(("rows", "keys"), [(6, 6), (6, 4), (4, 6), (5, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_causal_attention_is_aligned_at_the_start(monkeypatch, rows, keys, masked):
    """Kernels do not agree on what causal means where there are more queries: they see squares."""
    q, k, v = (torch.randn(2, n, 3, 8).double() for n in (rows, keys, keys))
    seen = torch.ones(rows, keys, dtype=torch.bool).tril()
    mask = None
    if masked:
        mask = torch.ones(2, 1, 1, keys, dtype=torch.bool)
        mask[0, ..., -1] = False
        seen = seen & mask
    whole, lse = attend_with_lse(q, k, v, mask=seen, causal=False)
    shapes = []
    written_out = with_lse._written_out

    def noting(q, k, v, mask, causal):
        shapes.append((causal, q.shape[2], k.shape[2]))
        return written_out(q, k, v, mask, causal)

    monkeypatch.setattr(with_lse, "_written_out", noting)
    out, found = attend_with_lse(q, k, v, mask=mask, causal=True)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(found, lse)
    assert all(size == count for causal, size, count in shapes if causal)


def test_a_causal_piece_with_padding_inside_is_refused():
    q, k, v = (torch.randn(1, 4, 1, 8) for _ in range(3))
    pieces = [Piece((Run(0, 1), Run(2, 2)), None)]
    assert ring_attention(q, k, v, pieces, Group("ring")).shape == q.shape
    with pytest.raises(AssertionError, match="padding at its end"):
        ring_attention(q, k, v, pieces, Group("ring"), causal=True)
