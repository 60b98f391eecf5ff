"""The arithmetic of pieces: nothing is lost, nothing comes twice, padding is left out."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.multimodal_gen.runtime.layers.sequence_shard import (
    Run,
    SequenceShard,
    join_streams,
    split_streams,
    take,
)
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError

NAMES = ("text", "image", "sound")
lengths = st.lists(st.integers(0, 23), min_size=1, max_size=3)
parts = st.integers(1, 6)


def sharded(parts, lengths):
    shard = SequenceShard(parts)
    for name, length in zip(NAMES, lengths, strict=False):
        shard = shard.with_stream(name, length)
    return shard, NAMES[: len(lengths)]


def tokens(length, dim, ndim=3):
    """Tokens numbered from 1 along ``dim``, so that a zero is padding."""
    shape = [1] * ndim
    shape[dim] = length
    return torch.arange(1, length + 1).view(shape)


@settings(deadline=None)
@given(parts, lengths, st.integers(0, 2))
def test_split_then_join_is_nothing(parts, lengths, dim):
    shard, names = sharded(parts, lengths)
    whole = tokens(sum(lengths), dim)
    pieces = [split_streams(whole, shard, names, part, dim) for part in range(parts)]
    assert {piece.shape[dim] for piece in pieces} == {shard.local(*names)}
    assert torch.equal(join_streams(torch.cat(pieces, dim), shard, names, dim - 3), whole)


@settings(deadline=None)
@given(parts, lengths, st.data())
def test_what_is_kept_is_all_tokens_and_no_padding(parts, lengths, data):
    shard, names = sharded(parts, lengths)
    first = data.draw(st.integers(0, parts - 1))
    some = range(first, data.draw(st.integers(first + 1, parts)))
    whole = tokens(sum(lengths), 0, ndim=1)
    pieces = [split_streams(whole, shard, names, part, 0) for part in some]
    kept = shard.kept(names, some)
    expected = torch.cat(pieces)
    assert torch.equal(take(torch.cat(pieces), kept, 0), expected[expected > 0])
    # As few copies as can be: between two runs there is padding.
    assert all(a.start + a.length < b.start for a, b in pairwise(kept))
    if some == range(parts):
        assert sum(run.length for run in kept) == sum(lengths)


@settings(deadline=None)
@given(parts, st.integers(0, 50))
def test_a_stream_is_dealt_evenly(parts, length):
    shard = SequenceShard(parts).with_stream("image", length)
    pieces = [shard.piece("image", part) for part in range(parts)]
    assert sum(piece.length for piece in pieces) == length
    assert shard.local("image") * parts < length + parts
    assert [p.start for p in pieces] == [
        min(length, i * shard.local("image")) for i in range(parts)
    ]


def test_padding_of_the_last_stream_alone_costs_no_copy():
    shard = SequenceShard(4, (("text", 8), ("image", 15)))
    assert shard.kept(("text", "image"), range(4)) == (Run(0, 23),)
    whole = torch.randn(1, 24, 2, 8)
    assert take(whole, (Run(0, 23),), 1).data_ptr() == whole.data_ptr()


def test_a_stream_has_one_length():
    shard = SequenceShard(2).with_stream("text", 7)
    assert shard.with_stream("text", 7) is shard
    with pytest.raises(PipelineDefinitionError, match=r"'text' has 7 tokens in one place .* and 8"):
        shard.with_stream("text", 8)
    with pytest.raises(PipelineDefinitionError, match=r"'image' is used before .* so far: text"):
        shard.local("image")


def test_padding_of_a_mask_is_false():
    shard = SequenceShard(2).with_stream("text", 3)
    mask = torch.ones(2, 3, dtype=torch.bool)
    piece = split_streams(mask, shard, ("text",), 1, 1)
    assert piece.tolist() == [[True, False]] * 2
