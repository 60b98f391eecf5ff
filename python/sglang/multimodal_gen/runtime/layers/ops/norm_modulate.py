"""Layer norm with scale and shift, and the gated residual before it, in one pass over memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang.multimodal_gen.runtime.layers.ops.fp8_rows import quantize_rows_plain
from sglang.multimodal_gen.runtime.layers.ops.operator import fused_operator

EPS = 1e-6


def norm_modulate_plain(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``LayerNorm(x) * (1 + scale) + shift``; x [B, S, D], shift and scale [B, 1, D]."""
    normed = F.layer_norm(x, x.shape[-1:], eps=EPS)
    return torch.addcmul(shift, normed, 1 + scale)


def add_gated_plain(residual: Tensor, gate: Tensor, update: Tensor) -> Tensor:
    """``residual + gate * update``; residual and update [B, S, D], gate [B, 1, D]."""
    return torch.addcmul(residual, gate, update)


def add_gated_norm_modulate_plain(
    residual: Tensor, gate: Tensor, update: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The new residual, and its `norm_modulate`."""
    x = add_gated_plain(residual, gate, update)
    return x, norm_modulate_plain(x, shift, scale)


def norm_modulate_rows_plain(
    x: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`norm_modulate`, and its rows quantised: e4m3 [B * S, D] and scales [B * S, 1]."""
    normed = norm_modulate_plain(x, shift, scale)
    return normed, *quantize_rows_plain(normed, False)


def add_gated_norm_modulate_rows_plain(
    residual: Tensor, gate: Tensor, update: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`add_gated_norm_modulate`, and the rows of the normed one quantised."""
    x = add_gated_plain(residual, gate, update)
    return x, *norm_modulate_rows_plain(x, shift, scale)


def _launch(*args: Any) -> tuple[Tensor, Tensor]:
    # Triton is imported by the first kernel that runs: a second that no CPU should wait.
    from sglang.multimodal_gen.runtime.layers.ops.triton import norm_modulate_kernel

    return norm_modulate_kernel.launch(*args)


def _norm_modulate_launch(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return _launch(x, None, None, shift, scale, EPS)[1]


def _add_gated_launch(residual: Tensor, gate: Tensor, update: Tensor) -> Tensor:
    return _launch(residual, gate, update, None, None, EPS)[0]


def _add_gated_norm_modulate_launch(
    residual: Tensor, gate: Tensor, update: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    return _launch(residual, gate, update, shift, scale, EPS)


def _launch_rows(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sglang.multimodal_gen.runtime.layers.ops.triton import norm_modulate_kernel

    return norm_modulate_kernel.launch_rows(*args)


def _norm_modulate_rows_launch(
    x: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _launch_rows(x, None, None, shift, scale, EPS)[1:]


def _add_gated_norm_modulate_rows_launch(
    residual: Tensor, gate: Tensor, update: Tensor, shift: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _launch_rows(residual, gate, update, shift, scale, EPS)


norm_modulate = fused_operator(
    "norm_modulate(Tensor x, Tensor shift, Tensor scale) -> Tensor",
    norm_modulate_plain,
    _norm_modulate_launch,
)
add_gated = fused_operator(
    "add_gated(Tensor residual, Tensor gate, Tensor update) -> Tensor",
    add_gated_plain,
    _add_gated_launch,
)
add_gated_norm_modulate = fused_operator(
    "add_gated_norm_modulate("
    "Tensor residual, Tensor gate, Tensor update, Tensor shift, Tensor scale"
    ") -> (Tensor, Tensor)",
    add_gated_norm_modulate_plain,
    _add_gated_norm_modulate_launch,
)
norm_modulate_rows = fused_operator(
    "norm_modulate_rows(Tensor x, Tensor shift, Tensor scale) -> (Tensor, Tensor, Tensor)",
    norm_modulate_rows_plain,
    _norm_modulate_rows_launch,
)
add_gated_norm_modulate_rows = fused_operator(
    "add_gated_norm_modulate_rows("
    "Tensor residual, Tensor gate, Tensor update, Tensor shift, Tensor scale"
    ") -> (Tensor, Tensor, Tensor, Tensor)",
    add_gated_norm_modulate_rows_plain,
    _add_gated_norm_modulate_rows_launch,
)
