"""Queries and keys, normed over each head or across all, and rotated: one stream, or several joined
into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.end_to_end import end_to_end
from sglang.multimodal_gen.runtime.layers.norm_across_heads import NormAcrossHeads
from sglang.multimodal_gen.runtime.layers.ops.qk_norm_rotary import (
    empty_heads,
    qk_norm_rotary,
    qk_norm_rotary_join,
    qk_norm_rotary_plain,
)
from sglang.multimodal_gen.runtime.layers.rotary_embedding import Rotary, rotate_pairs
from sglang.multimodal_gen.runtime.layers.wide_copy import copy_wide


class HeadStream(NamedTuple):
    """The projections of one stream, each [B, S, H, d], and its norms: over d, or over H * d."""

    q: Tensor
    k: Tensor
    v: Tensor
    norm_q: nn.RMSNorm | NormAcrossHeads
    norm_k: nn.RMSNorm | NormAcrossHeads

    @property
    def has_kernel(self) -> bool:
        """Whether one operator does it all; statistics that ranks put together are a message's."""
        return not isinstance(self.norm_q, NormAcrossHeads) and _has_kernel(self.q)

    def normed(self) -> tuple[Tensor, Tensor]:
        """q and k, normed; not yet rotated."""
        return _normed(self.norm_q, self.q), _normed(self.norm_k, self.k)


class HeadRoom(NamedTuple):
    """Where q, k and v of a joint sequence go, each [B, S, G, H / G, d]: heads in G groups.

    Any strides but the last, which is 1; without ``v`` values stay where they are.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None


def norm_rotate_join(
    streams: Sequence[HeadStream], rotary: Rotary
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the joint sequence: streams one after another, normed and rotated.

    ``rotary`` has a row for each position of the joint sequence.
    """
    if not streams[0].has_kernel:
        queries, keys = zip(*(stream.normed() for stream in streams), strict=True)
        q, k, v = (_after(parts) for parts in (queries, keys, [stream.v for stream in streams]))
        return rotate_pairs(q, rotary), rotate_pairs(k, rotary), v

    if torch.compiler.is_compiling():
        q, k = qk_norm_rotary_join(
            [stream.q for stream in streams],
            [stream.k for stream in streams],
            [_weight(stream.norm_q) for stream in streams],
            [_weight(stream.norm_k) for stream in streams],
            rotary.cos, rotary.sin, [_eps(stream) for stream in streams],
        )  # fmt: skip
        first, *others = [stream.v for stream in streams]
        return q, k, torch.cat((first, *others), dim=1) if others else first
    length = sum(stream.q.shape[1] for stream in streams)
    q, k = empty_heads(streams[0].q, length), empty_heads(streams[0].k, length)
    norm_rotate_into(streams, rotary, HeadRoom(q.unsqueeze(2), k.unsqueeze(2), None))
    return q, k, _joined([stream.v for stream in streams], length)


def norm_rotate_into(streams: Sequence[HeadStream], rotary: Rotary, room: HeadRoom) -> None:
    """`norm_rotate_join`, written where the caller wants it: no copy after it."""
    start = 0
    for stream in streams:
        here = slice(start, start + stream.q.shape[1])
        part = HeadRoom(*(None if x is None else x[:, here] for x in room))  # type: ignore[arg-type]
        _norm_rotate_stream(stream, Rotary(rotary.cos[here], rotary.sin[here]), part)
        start = here.stop


def _norm_rotate_stream(stream: HeadStream, rotary: Rotary, room: HeadRoom) -> None:
    """One stream of them."""
    q, k, v, norm_q, norm_k = stream
    if isinstance(norm_q, NormAcrossHeads):
        groups = room.q.shape[2:4]
        for x, place in zip(stream.normed(), room[:2], strict=True):
            copy_wide(place, rotate_pairs(x, rotary).unflatten(2, groups))
        if room.v is not None:
            copy_wide(room.v, v.unflatten(2, groups))
        return
    write = qk_norm_rotary if stream.has_kernel else qk_norm_rotary_plain
    moved = None if room.v is None else v
    write(q, k, moved, _weight(norm_q), _weight(norm_k), *rotary, _eps(stream), *room)


def _weight(norm: nn.RMSNorm | NormAcrossHeads) -> Tensor:
    assert norm.weight is not None
    return norm.weight


def _eps(stream: HeadStream) -> float:
    eps = stream.norm_q.eps
    assert eps is not None
    return eps


def _normed(norm: nn.RMSNorm | NormAcrossHeads, x: Tensor) -> Tensor:
    """Over each head, or across them, as the norm is wide."""
    if norm.normalized_shape[0] == x.shape[-1]:
        return norm(x)
    return norm(x.flatten(2)).view(x.shape)


def _after(parts: Sequence[Tensor]) -> Tensor:
    """One after another along the sequence; one alone as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=1)


def _joined(values: list[Tensor], length: int) -> Tensor:
    """The values one after another along the sequence; a view where they lie so already."""
    first = values[0]
    if first.shape[0] == 1:
        lying = end_to_end([value[0] for value in values])
        if lying is not None:
            return lying[None]
    joined = empty_heads(first, length)
    start = 0
    for value in values:
        copy_wide(joined[:, start : start + value.shape[1]], value)
        start += value.shape[1]
    return joined


def _has_kernel(x: Tensor) -> bool:
    """The kernel's tiles are powers of two.

    Tensors without values stand for a GPU's: `sglang plan` counts what one would do.
    """
    width = x.shape[-1]
    return x.device.type in ("cuda", "meta") and width & (width - 1) == 0
