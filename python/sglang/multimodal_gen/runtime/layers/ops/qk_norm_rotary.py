"""RMS norm of queries and keys over each head, or across all heads, and their rotation, in one pass
to their places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang.multimodal_gen.runtime.layers.ops.operator import fused_operator
from sglang.multimodal_gen.runtime.layers.rotary_embedding import Rotary, rotate_pairs


def qk_norm_rotary_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    q_out: Tensor,
    k_out: Tensor,
    v_out: Tensor | None,
) -> None:
    """``q_out = rotate(RMSNorm(q) * q_weight)``, the same for k; ``v_out = v`` where it is given.

    q, k and v [B, S, H, d]; weights [d], or [H * d] of norms across all heads; cos and sin
    [S, d / 2] float32, rotating neighbouring channels. Results are [B, S, G, H / G, d]: heads in G
    groups that may lie anywhere, so that a message's layout is written at once. Their last
    dimension is contiguous.
    """
    rotary, groups = Rotary(cos, sin), q_out.shape[2:4]
    for x, weight, out in ((q, q_weight, q_out), (k, k_weight, k_out)):
        whole = x if weight.numel() == x.shape[-1] else x.flatten(2)
        normed = F.rms_norm(whole, weight.shape, weight, eps)
        rotated = rotate_pairs(normed.view(x.shape), rotary)
        out.copy_(rotated.unflatten(2, groups))
    if v is not None and v_out is not None:
        v_out.copy_(v.unflatten(2, groups))


def _launch(*args: Any) -> None:
    from sglang.multimodal_gen.runtime.layers.ops.triton import qk_norm_rotary_kernel

    qk_norm_rotary_kernel.launch(*args)


qk_norm_rotary = fused_operator(
    "qk_norm_rotary(Tensor q, Tensor k, Tensor? v, Tensor q_weight, Tensor k_weight, Tensor cos, "
    "Tensor sin, float eps, Tensor(a!) q_out, Tensor(b!) k_out, Tensor(c!)? v_out) -> ()",
    qk_norm_rotary_plain,
    _launch,
)


def qk_norm_rotary_join_plain(
    q: list[Tensor],
    k: list[Tensor],
    q_weights: list[Tensor],
    k_weights: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    eps: list[float],
) -> tuple[Tensor, Tensor]:
    """Queries and keys of streams one after another, normed and rotated: [B, the sum of S, H, d].

    `qk_norm_rotary` of each stream, with results of its own, for compilers: those copy what an
    operator writes to. ``cos`` and ``sin`` have a row for each joint position.
    """
    return _join(qk_norm_rotary_plain, q, k, q_weights, k_weights, cos, sin, eps)


def _join_launch(*args: Any) -> tuple[Tensor, Tensor]:
    return _join(_launch, *args)


def _join(
    write: Callable[..., None],
    q: list[Tensor],
    k: list[Tensor],
    q_weights: list[Tensor],
    k_weights: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    eps: list[float],
) -> tuple[Tensor, Tensor]:
    length, start = sum(x.shape[1] for x in q), 0
    q_out, k_out = empty_heads(q[0], length), empty_heads(k[0], length)
    for q_one, k_one, *weights, small in zip(q, k, q_weights, k_weights, eps, strict=True):
        here = slice(start, start + q_one.shape[1])
        rooms = (room[:, here].unsqueeze(2) for room in (q_out, k_out))
        write(q_one, k_one, None, *weights, cos[here], sin[here], small, *rooms, None)
        start = here.stop
    return q_out, k_out


qk_norm_rotary_join = fused_operator(
    "qk_norm_rotary_join(Tensor[] q, Tensor[] k, Tensor[] q_weights, Tensor[] k_weights, "
    "Tensor cos, Tensor sin, float[] eps) -> (Tensor, Tensor)",
    qk_norm_rotary_join_plain,
    _join_launch,
)


def empty_heads(like: Tensor, length: int) -> Tensor:
    """Room for ``length`` positions of heads like ``like`` [B, S, H, d]."""
    batch, _, heads, head_dim = like.shape
    return torch.empty(batch, length, heads, head_dim, dtype=like.dtype, device=like.device)
