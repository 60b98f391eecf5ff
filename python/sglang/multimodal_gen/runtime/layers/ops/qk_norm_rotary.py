"""RMS norm of queries and keys over each head, and their rotation, in one pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang.multimodal_gen.runtime.layers.ops.operator import fused_operator
from sglang.multimodal_gen.runtime.layers.rotary_embedding import Rotary, rotate_pairs


def qk_norm_rotary_plain(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    q_out: Tensor,
    k_out: Tensor,
) -> None:
    """``q_out = rotate(RMSNorm(q) * q_weight)``, the same for k.

    q, k and the results [B, S, H, d]; weights [d]; cos and sin [S, d / 2] float32, rotating
    neighbouring channels. A result may be its own input.
    """
    rotary = Rotary(cos, sin)
    for x, weight, out in ((q, q_weight, q_out), (k, k_weight, k_out)):
        out.copy_(rotate_pairs(F.rms_norm(x, weight.shape, weight, eps), rotary))


def _launch(*args: Any) -> None:
    from sglang.multimodal_gen.runtime.layers.ops.triton import qk_norm_rotary_kernel

    qk_norm_rotary_kernel.launch(*args)


qk_norm_rotary = fused_operator(
    "qk_norm_rotary(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, "
    "float eps, Tensor(a!) q_out, Tensor(b!) k_out) -> ()",
    qk_norm_rotary_plain,
    _launch,
)


def empty_heads(like: Tensor, length: int) -> Tensor:
    """Room for ``length`` positions of heads like ``like`` [B, S, H, d]."""
    batch, _, heads, head_dim = like.shape
    return torch.empty(batch, length, heads, head_dim, dtype=like.dtype, device=like.device)
