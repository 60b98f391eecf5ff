"""Attention that also tells the log-sum-exp of its scores, so that parts of it can be merged."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

MAX_SCORES = 2**24
"""Scores that the plain form holds at a time: 64 MiB of float32."""
KERNEL_WIDTHS = 8
"""Kernels called directly take head widths that are multiples of this."""


def attend_with_lse(
    q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, *, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention over T keys, [B, S, H, D], and the log-sum-exp of its scores, float32 [B, S, H].

    On a GPU, with torch's kernel of choice for these shapes, if that tells its log-sum-exp; else
    written out. ``mask`` is boolean [B, 1, 1, T], True = attend; ``causal``: query i sees keys 0 to
    i, aligned at the start, also where S and T differ. Kernels, which do not agree on the
    alignment, are given squares alone.
    """
    rows, keys = q_BSHD.shape[1], k_BTHD.shape[1]
    if causal and rows < keys:
        k_BTHD, v_BTHD = k_BTHD[:, :rows], v_BTHD[:, :rows]
        mask = None if mask is None else mask[..., :rows]
    elif causal and rows > keys:
        square, rest = q_BSHD.split((keys, rows - keys), 1)
        parts = [
            attend_with_lse(square, k_BTHD, v_BTHD, mask=mask, causal=True),
            attend_with_lse(rest, k_BTHD, v_BTHD, mask=mask, causal=False),
        ]
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, 1), torch.cat(lses, 1)
    q, k, v = (x.transpose(1, 2) for x in (q_BSHD, k_BTHD, v_BTHD))
    if q.is_cuda and q.shape[-1] % KERNEL_WIDTHS == 0:
        out, lse = _on_gpu(q, k, v, mask, causal)
    else:
        out, lse = _written_out(q, k, v, mask, causal)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _on_gpu(
    q_BHSD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """By the kernel that torch itself would take for these shapes."""
    q, k, v = q_BHSD, k_BHTD, v_BHTD
    ops: Any = torch.ops.aten
    bias = None if mask is None else _bias(mask, q, k)
    choice = torch._fused_sdp_choice(q, k, v, attn_mask=bias, is_causal=causal)
    if choice == SDPBackend.CUDNN_ATTENTION.value:
        found = ops._scaled_dot_product_cudnn_attention(q, k, v, bias, True, is_causal=causal)
    elif choice == SDPBackend.FLASH_ATTENTION.value and bias is None:
        found = ops._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)
    elif choice == SDPBackend.EFFICIENT_ATTENTION.value:
        found = ops._scaled_dot_product_efficient_attention(q, k, v, bias, True, is_causal=causal)
    else:
        return _written_out(q, k, v, mask, causal)
    # Kernels differ in the log-sum-exp's shape: a trailing 1, or S rounded up.
    batch, heads, length, _ = q.shape
    return found[0], found[1].reshape(batch, heads, -1)[..., :length]


def _bias(mask: Tensor, q_BHSD: Tensor, k_BHTD: Tensor) -> Tensor:
    """The mask as kernels take it: added to the scores, rows aligned in memory.

    A large finite number in place of -inf: of a piece without a visible key kernels would make
    nan, and so they make something that the merge gives no weight.
    """
    batch, heads, length, _ = q_BHSD.shape
    keys = k_BHTD.shape[2]
    aligned = -(-keys // 16) * 16
    bias = q_BHSD.new_zeros((len(mask), 1, 1, aligned))[..., :keys]
    bias.masked_fill_(~mask, torch.finfo(q_BHSD.dtype).min / 2)
    return bias.expand(batch, heads, length, keys)


def _written_out(
    q_BHSD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """The formula, in float32 or better, some rows at a time."""
    batch, heads, length, width = q_BHSD.shape
    keys = k_BHTD.shape[2]
    dtype = torch.promote_types(q_BHSD.dtype, torch.float32)
    q, k, v = (x.to(dtype) for x in (q_BHSD, k_BHTD, v_BHTD))
    rows = max(1, MAX_SCORES // max(1, batch * heads * keys))
    outs, lses = [], []
    for start in range(0, length, rows):
        part = q[:, :, start : start + rows]
        scores = (part / math.sqrt(width)) @ k.transpose(-1, -2)
        if mask is not None:
            scores.masked_fill_(~mask, -torch.inf)
        if causal:
            row = torch.arange(start, start + part.shape[2], device=q.device)[:, None]
            scores.masked_fill_(torch.arange(keys, device=q.device) > row, -torch.inf)
        lse = scores.logsumexp(-1)
        # A query that sees no key: zero, and a log-sum-exp of -inf.
        weights = scores.sub_(lse.clamp_min(torch.finfo(dtype).min)[..., None]).exp_()
        outs.append(weights @ v)
        lses.append(lse)
    return torch.cat(outs, 2).to(q_BHSD.dtype), torch.cat(lses, 2)
