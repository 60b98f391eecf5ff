"""Ring attention: keys and values pass round a group, partial results are merged as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.attention.backends.backend import AttentionBackend
from sglang.multimodal_gen.runtime.layers.attention.backends.sdpa import SDPA
from sglang.multimodal_gen.runtime.layers.sequence_shard import Run, take
from sglang.multimodal_gen.runtime.layers.wide_copy import copy_wide


class Piece(NamedTuple):
    """The keys that one rank of the ring starts with.

    Attributes:
        kept: those that count; the others are padding.
        mask: boolean [B, 1, 1, kept], True = attend; None lets all be seen.
    """

    kept: Sequence[Run]
    mask: Tensor | None


def ring_attention(
    q_BSHD: Tensor,
    k_BTHD: Tensor,
    v_BTHD: Tensor,
    pieces: Sequence[Piece],
    group: Group,
    *,
    causal: bool = False,
    backend: AttentionBackend = SDPA,
) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks, [B, S, H, D].

    While a rank computes with one piece, the next one is on its way (Liu et al. 2023). Every rank
    passes on every piece, also one that it has no use for.

    Args:
        q_BSHD: this rank's queries.
        k_BTHD: this rank's keys; T is equal on all ranks, padding included.
        v_BTHD: this rank's values.
        pieces: what counts of each rank's keys.
        group: the ring.
        causal: pieces are in the order of the sequence, and no query sees a later key. Query i and
            key i of a rank are the same token: padding is at a piece's end.
        backend: what computes with one piece; it tells log-sum-exps.
    """
    held = k_BTHD.new_empty((2, *k_BTHD.shape))
    copy_wide(held[0], k_BTHD)
    copy_wide(held[1], v_BTHD)
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    merged: tuple[Tensor, Tensor] | None = None
    for step in range(group.size):
        source = (group.rank - step) % group.size
        incoming, jobs = held, []
        if step + 1 < group.size:
            incoming = torch.empty_like(held)
            jobs = group.exchange({after: held}, {before: incoming})
        kept, mask = pieces[source]
        if kept and not (causal and source > group.rank):
            k, v = take(held[0], kept, 1), take(held[1], kept, 1)
            own = causal and source == group.rank
            if own:
                assert len(kept) == 1, "a causal piece has padding at its end alone"
                assert kept[0].start == 0, "a causal piece has padding at its end alone"
            part = backend.attend_with_lse(q_BSHD, k, v, mask=mask, causal=own)
            merged = part if merged is None else merge(merged, part)
        for job in jobs:
            job.wait()
        held = incoming
    assert merged is not None, "a sequence without a token"
    return merged[0].to(q_BSHD.dtype)


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys together, from attention over each.

    Each is an output [B, S, H, D] and the log-sum-exp of its scores, [B, S, H]; so is the result,
    in float32 or better. A set of which a query saw nothing has log-sum-exp -inf and no weight.
    """
    (out_a, lse_a), (out_b, lse_b) = first, second
    dtype = torch.promote_types(torch.float32, lse_a.dtype)
    # exp(b) / (exp(a) + exp(b)); nan only where both are -inf, and then both outputs are zero.
    weight = torch.sigmoid(lse_b - lse_a).nan_to_num(nan=0.0)
    out = torch.lerp(out_a.to(dtype), out_b.to(dtype), weight[..., None])
    return out, torch.logaddexp(lse_a, lse_b)
