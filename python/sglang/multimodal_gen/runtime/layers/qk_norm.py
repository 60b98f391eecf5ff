"""Queries and keys, normed over each head and rotated: one stream, or several joined into one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.end_to_end import end_to_end
from sglang.multimodal_gen.runtime.layers.ops.qk_norm_rotary import empty_heads, qk_norm_rotary
from sglang.multimodal_gen.runtime.layers.rotary_embedding import Rotary, rotate_pairs
from sglang.multimodal_gen.runtime.layers.wide_copy import copy_wide


class HeadStream(NamedTuple):
    """The projections of one stream, each [B, S, H, d], and its norms."""

    q: Tensor
    k: Tensor
    v: Tensor
    norm_q: nn.RMSNorm
    norm_k: nn.RMSNorm


def norm_rotate_join(
    streams: tuple[HeadStream, ...], rotary: Rotary
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the joint sequence: streams one after another, normed and rotated.

    ``rotary`` has a row for each position of the joint sequence.
    """
    if not _has_kernel(streams[0].q):
        q = torch.cat([stream.norm_q(stream.q) for stream in streams], dim=1)
        k = torch.cat([stream.norm_k(stream.k) for stream in streams], dim=1)
        v = torch.cat([stream.v for stream in streams], dim=1)
        return rotate_pairs(q, rotary), rotate_pairs(k, rotary), v

    length = sum(stream.q.shape[1] for stream in streams)
    q, k = empty_heads(streams[0].q, length), empty_heads(streams[0].k, length)
    start = 0
    for stream in streams:
        here = slice(start, start + stream.q.shape[1])
        _norm_rotate(stream, rotary, here, q[:, here], k[:, here])
        start = here.stop
    return q, k, _joined([stream.v for stream in streams], length)


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


def _norm_rotate(
    stream: HeadStream, rotary: Rotary, here: slice, q_out: Tensor, k_out: Tensor
) -> None:
    norm_q, norm_k = stream.norm_q, stream.norm_k
    eps = norm_q.eps
    assert eps is not None
    qk_norm_rotary(
        stream.q, stream.k, norm_q.weight, norm_k.weight,
        rotary.cos[here], rotary.sin[here], eps, q_out, k_out,
    )  # fmt: skip


def _has_kernel(x: Tensor) -> bool:
    """The kernel's tiles are powers of two; the compiler fuses the plain form by itself.

    Tensors without values stand for a GPU's: `sglang plan` counts what one would do.
    """
    width = x.shape[-1]
    return (
        x.device.type in ("cuda", "meta")
        and not torch.compiler.is_compiling()
        and width & (width - 1) == 0
    )
