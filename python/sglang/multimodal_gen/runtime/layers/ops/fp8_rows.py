"""Rows in eight bits: what is quantised as it comes, and products with weights in eight bits.

The type is e4m3 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022): four exponent and
three mantissa bits, at most 448. Each row of an input has a scale of its own, found from its
largest value as it comes (dynamic): ``row = values * scale``.

Legend: M rows (all leading dimensions), I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sglang.multimodal_gen.runtime.layers.ops.operator import NAMESPACE, fused_operator

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-12
"""Of rows that hold nothing but zeros."""
FEW_ROWS = 16
"""Up to here a product only waits for its weight: its rows keep their own type."""


def scale_of(largest: Tensor) -> Tensor:
    """The scale that makes ``largest`` (absolute) the type's largest value."""
    return (largest.float() / E4M3_MAX).clamp(min=SMALLEST_SCALE)


def to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """``x / scale``, rounded to the nearest; a cast alone would make what is too large NaN."""
    return (x.float() * scale.reciprocal()).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def wide(x: Tensor) -> Tensor:
    """Values in float32. On a CPU e4m3 is looked up: torch's cast takes five times as long."""
    if x.dtype != E4M3 or x.device.type != "cpu":
        return x.float()
    values = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    return values.index_select(0, x.reshape(-1).view(torch.uint8).int()).view(x.shape)


def quantize_rows_plain(x: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """Rows [..., I] -> e4m3 [M, I] and scales [M, 1] float32; GELU (tanh form) first, if asked."""
    x = F.gelu(x.float(), approximate="tanh") if gelu else x
    flat = x.reshape(-1, x.shape[-1])
    scale = scale_of(flat.abs().amax(dim=-1, keepdim=True))
    return to_e4m3(flat, scale), scale


def join_rows_plain(left: Tensor, right: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """The rows of ``cat((left, right))``, quantised; GELU of the right part first, if asked."""
    right = F.gelu(right.float(), approximate="tanh") if gelu else right
    return quantize_rows_plain(torch.cat((left.to(right.dtype), right), dim=-1), False)


def fp8_product_plain(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """``out = (rows * row_scale) @ (weight * weight_scale).T + bias``.

    rows [M, I] and weight [O, I] e4m3; row_scale [M, 1] and weight_scale [O], or one number each.
    """
    product = (wide(rows) @ wide(weight).t()) * row_scale * weight_scale
    out.copy_(product if bias is None else product + bias)


def fp8_few_rows_plain(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """``x @ (weight * weight_scale).T + bias`` of at most `FEW_ROWS` rows; x [M, I] is not rounded.

    One row conditions all tokens (modulation): rounding it would move them all alike, and its
    product takes as long as its weight takes to read.
    """
    product = (x.float() @ wide(weight).t()) * weight_scale
    return (product if bias is None else product + bias).to(x.dtype)


def _quantize_launch(x: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    from sglang.multimodal_gen.runtime.layers.ops.triton import quantize_rows_kernel

    return quantize_rows_kernel.launch(None, x, gelu)


def _join_launch(left: Tensor, right: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    from sglang.multimodal_gen.runtime.layers.ops.triton import quantize_rows_kernel

    return quantize_rows_kernel.launch(left, right, gelu)


def _few_rows_launch(*args: Any) -> Tensor:
    from sglang.multimodal_gen.runtime.layers.ops.triton import few_rows_kernel

    return few_rows_kernel.launch(*args)


def _product_launch(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """torch's own product, which writes bfloat16; sums keep fewer bits (``use_fast_accum``)."""
    one = weight_scale.numel() == 1
    direct = out.dtype == torch.bfloat16 and out.is_contiguous()
    target = out if direct else torch.empty_like(out, dtype=torch.bfloat16)
    torch._scaled_mm(
        rows,
        weight.t(),
        scale_a=row_scale.reshape(()) if one else row_scale,
        scale_b=weight_scale.reshape(()) if one else weight_scale[None],
        bias=None if bias is None else bias.to(torch.bfloat16),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
        out=target,
    )
    if target is not out:
        out.copy_(target)


quantize_rows = fused_operator(
    "fp8_quantize_rows(Tensor x, bool gelu) -> (Tensor, Tensor)",
    quantize_rows_plain,
    _quantize_launch,
)
join_rows = fused_operator(
    "fp8_join_rows(Tensor left, Tensor right, bool gelu) -> (Tensor, Tensor)",
    join_rows_plain,
    _join_launch,
)
fp8_product = fused_operator(
    "fp8_product(Tensor rows, Tensor row_scale, Tensor weight, Tensor weight_scale, Tensor? bias, "
    "Tensor(a!) out) -> ()",
    fp8_product_plain,
    _product_launch,
    needs_triton=False,
)
fp8_few_rows = fused_operator(
    "fp8_few_rows(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias) -> Tensor",
    fp8_few_rows_plain,
    _few_rows_launch,
)


def _product_flops(
    rows: Sequence[int], _: object, weight: Sequence[int], *rest: Any, **kw: Any
) -> int:
    return 2 * rows[0] * weight[0] * weight[1]


def _few_rows_flops(x: Sequence[int], weight: Sequence[int], *rest: Any, **kw: Any) -> int:
    return 2 * x[0] * weight[0] * weight[1]


# What a count of floating-point operations (torch's, and this runtime's plans) takes them for.
_ops = getattr(torch.ops, NAMESPACE)
register_flop_formula(_ops.fp8_product)(_product_flops)
register_flop_formula(_ops.fp8_few_rows)(_few_rows_flops)
