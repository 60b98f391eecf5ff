"""Rows to e4m3 with a scale each: one program for each row, which stays in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.multimodal_gen.runtime.layers.ops.fp8_rows import E4M3_MAX, SMALLEST_SCALE


@triton.jit
def gelu_tanh(x):
    """The tanh form of GELU, ``x / (1 + exp(-2 y))``: no finite ``x`` makes it NaN."""
    y = x * (0.7978845608028654 + 0.035677408136300125 * x * x)
    return x / (1.0 + tl.exp(-2.0 * y))


@triton.jit
def store_row(
    x, inside, column, row, width, values_ptr, scale_ptr,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Quantise one row of float32, zeros outside, and write it.

    The compiler looks names up in a callee's annotations too: there are none but its own.
    """
    scale = tl.maximum(tl.max(tl.abs(x), 0) / LARGEST, SMALLEST)
    tl.store(scale_ptr + row, scale)
    # One division a row, not one a value.
    scaled = x * (1.0 / scale)
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST, propagate_nan=tl.PropagateNan.ALL),
                        LARGEST, propagate_nan=tl.PropagateNan.ALL)  # fmt: skip
    tl.store(values_ptr + row * width + column, scaled.to(values_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _kernel(
    left_ptr, right_ptr, values_ptr, scale_ptr, left_width, right_width, left_row, right_row,
    JOINED: tl.constexpr, GELU: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    width = left_width + right_width
    inside = column < width
    on_right = inside & (column >= left_width)
    at = right_ptr + row * right_row + (column - left_width)
    x = tl.load(at, mask=on_right, other=0.0).to(tl.float32)
    if GELU:
        x = gelu_tanh(x)  # of the zeros outside: zero
    if JOINED:
        left = tl.load(left_ptr + row * left_row + column, mask=column < left_width, other=0.0)
        x = tl.where(column < left_width, left.to(tl.float32), x)
    store_row(x, inside, column, row, width, values_ptr, scale_ptr, LARGEST, SMALLEST)


def launch(
    left: Tensor | None, right: Tensor, gelu: bool, values_dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """(values [M, I], scales [M, 1]) of the rows of ``left`` (if any) and ``right`` side by side.

    ``values_dtype`` is for Triton's interpreter, which may lack e4m3.
    """
    right = _rows(right)
    first = right if left is None else _rows(left)
    left_width = 0 if left is None else first.shape[1]
    rows, width = right.shape[0], left_width + right.shape[1]
    values = torch.empty(rows, width, dtype=values_dtype, device=right.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=right.device)
    block = triton.next_power_of_2(width)
    _kernel[(rows,)](
        first, right, values, scale, left_width, right.shape[1], first.stride(0), right.stride(0),
        JOINED=left is not None, GELU=gelu, LARGEST=E4M3_MAX,
        SMALLEST=SMALLEST_SCALE, BLOCK=block,
        # 64 values a thread: 4,608 rows of 3,072 + 12,288 take 69 us with GELU, 73 with half of it.
        num_warps=min(8, max(1, block // 2048)),  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return values, scale


def _rows(x: Tensor) -> Tensor:
    """[..., I] as [M, I] with contiguous rows; a copy only where strides do not allow a view."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, x.shape[-1])
