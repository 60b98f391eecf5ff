from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sglang.multimodal_gen.runtime.layers.shard import Shard, shard_of, sharded


@given(
    blocks=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    size=st.integers(1, 5),
    dim=st.integers(0, 1),
)
def test_the_slices_of_all_ranks_make_up_the_whole(blocks, size, dim):
    total = sum(blocks)
    whole = torch.arange(3.0 * total).view(total, 3).movedim(0, dim)
    shards = [Shard(dim, tuple(blocks), rank, size) for rank in range(size)]
    joined, start = [], 0
    for index, width in enumerate(blocks):
        block = whole.narrow(dim, start, width)
        pieces = [whole.narrow(dim, a, b - a) for a, b in (s.pieces[index] for s in shards)]
        assert torch.equal(torch.cat(pieces, dim), block)
        assert max(p.shape[dim] for p in pieces) - min(p.shape[dim] for p in pieces) <= 1
        joined.append(pieces)
        start += width
    for rank, shard in enumerate(shards):
        local = shard.of(whole)
        assert torch.equal(local, torch.cat([pieces[rank] for pieces in joined], dim))
        assert shard.whole_shape(local.shape) == whole.shape


def test_a_parameter_knows_its_slice_and_keeps_what_it_knew():
    whole = nn.Parameter(torch.rand(4, 3))
    vars(whole)["told"] = "something"
    shard = Shard(0, (4,), 1, 2)
    part = sharded(whole, shard)
    assert shard_of(part) == shard
    assert shard_of(whole) is None
    assert vars(part)["told"] == "something"
    assert not part.requires_grad
    assert part.untyped_storage().nbytes() == 2 * 3 * 4
    assert sharded(nn.Parameter(torch.empty(4, 3, device="meta")), shard).is_meta
