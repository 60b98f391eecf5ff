"""RMS norm over channels, and SiLU: some pixels of a channels-last map for each program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096
"""Of a program, channels filled up to a power of two: 32 for each thread of four warps."""


@triton.jit
def _kernel(
    x_ptr, gamma_ptr, out_ptr, pixels, channels, x_batch, out_batch, scale, eps,
    SILU: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, BLOCK)
    inside = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    at = pixel[:, None] * channels + channel[None, :]
    x = tl.load(x_ptr + batch * x_batch + at, mask=inside, other=0.0).to(tl.float32)
    gamma = tl.load(gamma_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)
    length = tl.maximum(tl.sqrt(tl.sum(x * x, 1)), eps)
    out = x / length[:, None] * scale * gamma[None, :]
    if SILU:
        out = out / (1.0 + tl.exp(-out))
    tl.store(out_ptr + batch * out_batch + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def takes(x: Tensor, out: Tensor) -> bool:
    """Whether the kernel can read ``x`` and write ``out``: pixels side by side, channels inside."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return x.dtype in dtypes and all(
        batch.movedim(0, -1).is_contiguous() for batch in (x[0], out[0])
    )


def launch(x: Tensor, gamma: Tensor, out: Tensor, scale: float, eps: float, silu: bool) -> None:
    """Both [B, C, ...] with channels innermost; batches may lie apart."""
    count, channels = x.shape[:2]
    pixels = x[0, 0].numel()
    block = triton.next_power_of_2(channels)
    many = max(1, ELEMENTS // block)
    _kernel[(triton.cdiv(pixels, many), count)](
        x, gamma.reshape(-1), out, pixels, channels, x.stride(0), out.stride(0), scale, eps,
        SILU=silu, PIXELS=many, BLOCK=block, num_warps=4,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
