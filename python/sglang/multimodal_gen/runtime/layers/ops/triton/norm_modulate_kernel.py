"""``residual + gate * update``, then layer norm, scale and shift: one program for each row.

Scale, shift and gate have a batch and a row stride each (0 for one that all share), and may be of
another type than the rows: all is computed in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.multimodal_gen.runtime.layers.ops.fp8_rows import E4M3_MAX, SMALLEST_SCALE
from sglang.multimodal_gen.runtime.layers.ops.triton.quantize_rows_kernel import store_row


@triton.jit
def _kernel(
    x_ptr, update_ptr, gate_ptr, shift_ptr, scale_ptr, sum_ptr, out_ptr, values_ptr, row_scale_ptr,
    rows, dim, x_batch, x_row, update_batch, update_row, gate_batch, gate_row,
    shift_batch, shift_row, scale_batch, scale_row, eps,
    ADDED: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    ROWS: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    batch, row = program // rows, program % rows
    column = tl.arange(0, BLOCK)
    inside = column < dim
    x = tl.load(x_ptr + batch * x_batch + row * x_row + column, mask=inside, other=0.0)
    x = x.to(tl.float32)
    if ADDED:
        at = batch * update_batch + row * update_row
        update = tl.load(update_ptr + at + column, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            at = batch * gate_batch + row * gate_row
            update *= tl.load(gate_ptr + at + column, mask=inside, other=0.0).to(tl.float32)
        total = (x + update).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + program * dim + column, total, mask=inside)
        x = total.to(tl.float32)  # the norm sees what later layers will see
    if NORM:
        mean = tl.sum(x, 0) / dim
        centred = tl.where(inside, x - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, 0) / dim + eps)
        at = batch * scale_batch + row * scale_row
        scale = tl.load(scale_ptr + at + column, mask=inside, other=0.0).to(tl.float32)
        at = batch * shift_batch + row * shift_row
        shift = tl.load(shift_ptr + at + column, mask=inside, other=0.0).to(tl.float32)
        out = centred * rstd * (OFFSET + scale) + shift
        out = out.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + program * dim + column, out, mask=inside)
        if ROWS:
            # What a quantiser of its own would see: rounded to the result's type before.
            row_out = tl.where(inside, out.to(tl.float32), 0.0)
            store_row(
                row_out, inside, column, program, dim, values_ptr, row_scale_ptr, LARGEST, SMALLEST
            )


def launch(
    x: Tensor,
    gate: Tensor | None,
    update: Tensor | None,
    shift: Tensor | None,
    scale: Tensor | None,
    eps: float,
    affine: bool = False,
) -> tuple[Tensor, Tensor]:
    """(sum, normed): the first is ``x`` without an update, the second the sum without a norm.

    Rows of ``x`` and ``update`` [B, S, D] may be strided; the last dimension is contiguous.
    """
    return _launched(x, gate, update, shift, scale, eps, affine, None)


def launch_rows(
    x: Tensor,
    gate: Tensor | None,
    update: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    eps: float,
    affine: bool = False,
    values_dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, and the normed rows quantised: values [B * S, D], scales [B * S, 1]."""
    count = x.shape[0] * x.shape[1]
    values = torch.empty(count, x.shape[-1], dtype=values_dtype, device=x.device)
    row_scale = torch.empty(count, 1, dtype=torch.float32, device=x.device)
    total, normed = _launched(x, gate, update, shift, scale, eps, affine, (values, row_scale))
    return total, normed, values, row_scale


def _launched(
    x: Tensor,
    gate: Tensor | None,
    update: Tensor | None,
    shift: Tensor | None,
    scale: Tensor | None,
    eps: float,
    affine: bool,
    quantized: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    batch, rows, dim = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    added, gated, norm = update is not None, gate is not None, shift is not None
    update = x if update is None else update
    update = update if update.stride(-1) == 1 else update.contiguous()
    gate, shift, scale = (x if t is None else _readable(t) for t in (gate, shift, scale))
    total = torch.empty_like(x, memory_format=torch.contiguous_format) if added else x
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if norm else total
    values, row_scale = (x, x) if quantized is None else quantized
    block = triton.next_power_of_2(dim)
    _kernel[(batch * rows,)](
        x, update, gate, shift, scale, total, out, values, row_scale,
        rows, dim, x.stride(0), x.stride(1), update.stride(0), update.stride(1),
        *_steps(gate), *_steps(shift), *_steps(scale), eps,
        ADDED=added, GATED=gated, NORM=norm, OFFSET=0.0 if affine else 1.0,
        ROWS=quantized is not None, LARGEST=E4M3_MAX, SMALLEST=SMALLEST_SCALE,
        # On an H200, 4,608 rows of 3,072: 16.8 us with 32 values a thread, 21.9 with 16; the sum
        # and the norm of 32,760 x 1,536 100 us with either. Rows in eight bits: 64 values.
        BLOCK=block,
        num_warps=min(16, max(1, block // (1024 if quantized is None else 2048))),  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return total, out


def _readable(modulation: Tensor) -> Tensor:
    return modulation if modulation.stride(-1) == 1 else modulation.contiguous()


def _steps(modulation: Tensor) -> tuple[int, int]:
    """From one image's, and one row's, to the next; [D] and dimensions of 1 are for all."""
    if modulation.ndim == 1:
        return 0, 0
    batch, row = (
        0 if size == 1 else step
        for size, step in zip(modulation.shape[:2], modulation.stride()[:2], strict=True)
    )
    return batch, row
