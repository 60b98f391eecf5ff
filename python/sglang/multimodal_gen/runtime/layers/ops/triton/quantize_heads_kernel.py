"""Heads to e4m3 with a scale each: the largest values first, then the values divided.

The second reading finds what fits of the first in the GPU's second-level cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang.multimodal_gen.runtime.layers.ops.fp8_rows import E4M3_MAX

POSITIONS = 64
"""Of a program, for one head: a tile of 64 x 128 is 64 numbers for each thread of four warps."""


@triton.jit
def _largest(
    x_ptr, largest_ptr, length, heads, head_dim, x_batch, x_row, x_head,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    inside = (row < length)[:, None] & (column < head_dim)[None, :]
    at = batch * x_batch + row[:, None] * x_row + head * x_head + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    # Which program is last does not matter: the largest is the largest.
    tl.atomic_max(largest_ptr + batch * heads + head, tl.max(tl.max(tl.abs(x), 1), 0))


@triton.jit
def _divide(
    x_ptr, largest_ptr, values_ptr, scale_ptr, length, heads, head_dim, x_batch, x_row, x_head,
    smallest, LARGEST: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    inside = (row < length)[:, None] & (column < head_dim)[None, :]
    at = batch * x_batch + row[:, None] * x_row + head * x_head + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.load(largest_ptr + batch * heads + head), smallest) / LARGEST
    tl.store(scale_ptr + batch * heads + head, scale)  # every program of a head: the same
    at = ((batch * length + row[:, None]) * heads + head) * head_dim + column[None, :]
    scaled = x * (1.0 / scale)
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST, propagate_nan=tl.PropagateNan.ALL),
                        LARGEST, propagate_nan=tl.PropagateNan.ALL)  # fmt: skip
    tl.store(values_ptr + at, scaled.to(values_ptr.dtype.element_ty), mask=inside)


def launch(
    x: Tensor, smallest: float, values_dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """(values [B, S, H, D] contiguous, scales [B, H]) of x [B, S, H, D], its last dimension dense.

    ``values_dtype`` is for Triton's interpreter, which may lack e4m3.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, length, heads, head_dim = x.shape
    largest = torch.zeros(batch, heads, dtype=torch.float32, device=x.device)
    scale = torch.empty_like(largest)
    values = torch.empty(x.shape, dtype=values_dtype, device=x.device)
    grid = (triton.cdiv(length, POSITIONS), heads, batch)
    x_batch, x_row, x_head, _ = x.stride()
    block = triton.next_power_of_2(head_dim)
    _largest[grid](
        x, largest, length, heads, head_dim, x_batch, x_row, x_head,
        TILE=POSITIONS, BLOCK=block, num_warps=4,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    _divide[grid](
        x, largest, values, scale, length, heads, head_dim, x_batch, x_row, x_head, smallest,
        LARGEST=E4M3_MAX, TILE=POSITIONS, BLOCK=block, num_warps=4,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return values, scale
