"""Layer norm with scale and shift, and the gated residual before it, in one pass over memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang.multimodal_gen.runtime.layers.ops.fp8_rows import quantize_rows_plain
from sglang.multimodal_gen.runtime.layers.ops.operator import fused_operator

EPS = 1e-6


def norm_modulate_plain(
    x: Tensor, shift: Tensor, scale: Tensor, eps: float = EPS, affine: bool = False
) -> Tensor:
    """``LayerNorm(x) * (1 + scale) + shift``; ``affine``: ``LayerNorm(x) * scale + shift``.

    x [B, S, D]; shift and scale [B, 1, D] or [B, S, D], of an affine norm [D]. Where they are wider
    than x (float32 beside bfloat16), all is computed as they are, and rounded once.
    """
    wide = x.to(shift.dtype)
    if affine:
        return F.layer_norm(wide, x.shape[-1:], scale, shift, eps).to(x.dtype)
    normed = F.layer_norm(wide, x.shape[-1:], eps=eps)
    return torch.addcmul(shift, normed, 1 + scale).to(x.dtype)


def add_gated_plain(residual: Tensor, gate: Tensor | None, update: Tensor) -> Tensor:
    """``residual + gate * update``; residual and update [B, S, D], gate [B, 1, D] or [B, S, D].

    Without a gate their sum; a gate that is wider than they are decides in what it is computed.
    """
    if gate is None:
        return residual + update
    wide, dtype = gate.dtype, residual.dtype
    return torch.addcmul(residual.to(wide), gate, update.to(wide)).to(dtype)


def add_gated_norm_modulate_plain(
    residual: Tensor,
    gate: Tensor | None,
    update: Tensor,
    shift: Tensor,
    scale: Tensor,
    eps: float = EPS,
    affine: bool = False,
) -> tuple[Tensor, Tensor]:
    """The new residual, and its `norm_modulate`."""
    x = add_gated_plain(residual, gate, update)
    return x, norm_modulate_plain(x, shift, scale, eps, affine)


def norm_modulate_rows_plain(
    x: Tensor, shift: Tensor, scale: Tensor, eps: float = EPS, affine: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """`norm_modulate`, and its rows quantised: e4m3 [B * S, D] and scales [B * S, 1]."""
    normed = norm_modulate_plain(x, shift, scale, eps, affine)
    return normed, *quantize_rows_plain(normed, False)


def add_gated_norm_modulate_rows_plain(
    residual: Tensor,
    gate: Tensor | None,
    update: Tensor,
    shift: Tensor,
    scale: Tensor,
    eps: float = EPS,
    affine: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`add_gated_norm_modulate`, and the rows of the normed one quantised."""
    x = add_gated_plain(residual, gate, update)
    return x, *norm_modulate_rows_plain(x, shift, scale, eps, affine)


def _launch(*args: Any) -> tuple[Tensor, Tensor]:
    # Triton is imported by the first kernel that runs: a second that no CPU should wait.
    from sglang.multimodal_gen.runtime.layers.ops.triton import norm_modulate_kernel

    return norm_modulate_kernel.launch(*args)


# The dispatcher leaves out arguments that are at their defaults.
def _norm_modulate_launch(
    x: Tensor, shift: Tensor, scale: Tensor, eps: float = EPS, affine: bool = False
) -> Tensor:
    return _launch(x, None, None, shift, scale, eps, affine)[1]


def _add_gated_launch(residual: Tensor, gate: Tensor | None, update: Tensor) -> Tensor:
    return _launch(residual, gate, update, None, None, EPS)[0]


def _add_gated_norm_modulate_launch(
    residual: Tensor,
    gate: Tensor | None,
    update: Tensor,
    shift: Tensor,
    scale: Tensor,
    eps: float = EPS,
    affine: bool = False,
) -> tuple[Tensor, Tensor]:
    return _launch(residual, gate, update, shift, scale, eps, affine)


def _launch_rows(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sglang.multimodal_gen.runtime.layers.ops.triton import norm_modulate_kernel

    return norm_modulate_kernel.launch_rows(*args)


def _norm_modulate_rows_launch(
    x: Tensor, shift: Tensor, scale: Tensor, eps: float = EPS, affine: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    return _launch_rows(x, None, None, shift, scale, eps, affine)[1:]


def _add_gated_norm_modulate_rows_launch(
    residual: Tensor,
    gate: Tensor | None,
    update: Tensor,
    shift: Tensor,
    scale: Tensor,
    eps: float = EPS,
    affine: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _launch_rows(residual, gate, update, shift, scale, eps, affine)


_HOW = f"float eps={EPS}, bool affine=False"

norm_modulate = fused_operator(
    f"norm_modulate(Tensor x, Tensor shift, Tensor scale, {_HOW}) -> Tensor",
    norm_modulate_plain,
    _norm_modulate_launch,
)
add_gated = fused_operator(
    "add_gated(Tensor residual, Tensor? gate, Tensor update) -> Tensor",
    add_gated_plain,
    _add_gated_launch,
)
add_gated_norm_modulate = fused_operator(
    "add_gated_norm_modulate("
    f"Tensor residual, Tensor? gate, Tensor update, Tensor shift, Tensor scale, {_HOW}"
    ") -> (Tensor, Tensor)",
    add_gated_norm_modulate_plain,
    _add_gated_norm_modulate_launch,
)
norm_modulate_rows = fused_operator(
    f"norm_modulate_rows(Tensor x, Tensor shift, Tensor scale, {_HOW}) -> (Tensor, Tensor, Tensor)",
    norm_modulate_rows_plain,
    _norm_modulate_rows_launch,
)
add_gated_norm_modulate_rows = fused_operator(
    "add_gated_norm_modulate_rows("
    f"Tensor residual, Tensor? gate, Tensor update, Tensor shift, Tensor scale, {_HOW}"
    ") -> (Tensor, Tensor, Tensor, Tensor)",
    add_gated_norm_modulate_rows_plain,
    _add_gated_norm_modulate_rows_launch,
)
