"""Group norm of a map whose channels lie side by side, and SiLU after it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang.multimodal_gen.runtime.layers.ops.operator import fused_operator


def group_norm_silu_plain(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> Tensor:
    """``group_norm(x)``, or SiLU of it, in x's own order in memory; x is [B, C, ...]."""
    normed = F.group_norm(x, groups, weight, bias, eps)
    out = F.silu(normed) if silu else normed
    # Without values torch answers contiguously whatever the order was.
    return out if out.stride() == x.stride() else torch.empty_like(x).copy_(out)


def _launch(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool) -> Tensor:
    # Triton is imported by the first kernel that runs: a second that no CPU should wait.
    from sglang.multimodal_gen.runtime.layers.ops.triton import group_norm_kernel

    if not group_norm_kernel.takes(x):
        return group_norm_silu_plain(x, weight, bias, groups, eps, silu)
    return group_norm_kernel.launch(x, weight, bias, groups, eps, silu)


group_norm_silu = fused_operator(
    "group_norm_silu("
    "Tensor x, Tensor weight, Tensor bias, int groups, float eps, bool silu) -> Tensor",
    group_norm_silu_plain,
    _launch,
    keeps_order=True,
)
