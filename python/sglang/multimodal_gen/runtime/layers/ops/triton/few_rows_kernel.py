"""The product of a few rows with a weight in e4m3: as fast as the weight can be read.

A program makes some outputs of all rows; the weight becomes float32 in registers, never in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

OUTPUTS, INPUTS = 16, 256
"""Of one program, and of one turn of its loop."""


@triton.jit
def _kernel(
    x_ptr, weight_ptr, weight_scale_ptr, bias_ptr, out_ptr, outputs, x_row, scale_step,
    inputs: tl.constexpr, ROWS: tl.constexpr, BIAS: tl.constexpr, OUT: tl.constexpr,
    IN: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * OUT + tl.arange(0, OUT)
    exists = output < outputs
    scale = tl.load(weight_scale_ptr + output * scale_step, mask=exists, other=0.0)
    for row in range(ROWS):
        total = tl.zeros((OUT,), dtype=tl.float32)
        for start in range(0, inputs, IN):
            column = start + tl.arange(0, IN)
            at = output.to(tl.int64)[:, None] * inputs + column[None]
            both = exists[:, None] & (column < inputs)[None]
            weight = tl.load(weight_ptr + at, mask=both, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + row * x_row + column, mask=column < inputs, other=0.0)
            total += tl.sum(weight * x.to(tl.float32)[None], 1)
        total = total * scale
        if BIAS:
            total += tl.load(bias_ptr + output, mask=exists, other=0.0).to(tl.float32)
        at_out = out_ptr + row * outputs + output
        tl.store(at_out, total.to(out_ptr.dtype.element_ty), mask=exists)


def launch(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """[M, I] -> [M, O], in the type of ``x``. Rows after the first read the weight from the L2."""
    x = x.contiguous()
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _kernel[(triton.cdiv(outputs, OUTPUTS),)](
        x, weight, weight_scale, x if bias is None else bias, out, outputs, x.stride(0),
        min(1, weight_scale.numel() - 1),
        inputs=inputs, ROWS=rows, BIAS=bias is not None, OUT=OUTPUTS, IN=INPUTS,
        num_warps=4,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return out
