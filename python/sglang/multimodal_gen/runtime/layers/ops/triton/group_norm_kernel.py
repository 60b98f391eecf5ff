"""Group norm of channels-last maps, and SiLU: sums of spans of pixels, moments, then the map again.

Torch's own kernel for CUDA takes maps whose pixels lie side by side, and copies others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096
"""Of a tile: some pixels, channels filled up to a power of two."""
MOST_SPANS = 1024
"""Of one map: some programs for each multiprocessor, few enough to be added up by one."""
SPANS_AT_ONCE = 64
"""That one program adds up in a tile."""


@triton.jit
def _sums(
    x_ptr, sums_ptr, pixels, channels, x_batch,
    ROUNDS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each channel: its sum, and that of its squares; both less the first pixel's value."""
    batch = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    known = channel < channels
    near = tl.load(x_ptr + batch * x_batch + channel, mask=known, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROUNDS * STEP
    for i in range(ROUNDS):
        pixel = first + i * STEP + tl.arange(0, STEP)
        inside = (pixel < pixels)[:, None] & known[None, :]
        at = batch * x_batch + pixel[:, None] * channels + channel[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, x - near[None, :], 0.0)
        total += tl.sum(x, 0)
        squares += tl.sum(x * x, 0)
    row = (batch * tl.num_programs(0) + tl.program_id(0)) * 2 * channels
    tl.store(sums_ptr + row + channel, total, mask=known)
    tl.store(sums_ptr + row + channels + channel, squares, mask=known)


@triton.jit
def _moments(
    x_ptr, sums_ptr, weight_ptr, moments_ptr, spans, pixels, channels, width, x_batch, eps,
    ROUNDS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each channel: its group's mean, and its weight over its group's deviation."""
    group, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    member = tl.arange(0, BLOCK)
    channel, known = group * width + member, member < width
    near = tl.load(x_ptr + batch * x_batch + channel, mask=known, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for i in range(ROUNDS):
        span = i * STEP + tl.arange(0, STEP)
        inside = (span < spans)[:, None] & known[None, :]
        at = (batch * spans + span[:, None]) * 2 * channels + channel[None, :]
        total += tl.sum(tl.load(sums_ptr + at, mask=inside, other=0.0), 0)
        squares += tl.sum(tl.load(sums_ptr + at + channels, mask=inside, other=0.0), 0)
    offset = total / pixels
    variance = squares / pixels - offset * offset  # about a value of the map: little cancels
    mean = tl.sum(tl.where(known, near + offset, 0.0), 0) / width
    apart = near + offset - mean
    variance = tl.sum(tl.where(known, variance + apart * apart, 0.0), 0) / width
    weight = tl.load(weight_ptr + channel, mask=known, other=0.0).to(tl.float32)
    row = moments_ptr + batch * 2 * channels + channel
    tl.store(row, mean + tl.zeros((BLOCK,), tl.float32), mask=known)
    tl.store(row + channels, weight / tl.sqrt(variance + eps), mask=known)


@triton.jit
def _normalize(
    x_ptr, moments_ptr, bias_ptr, out_ptr, pixels, channels, x_batch, out_batch,
    SILU: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0).to(tl.int64) * STEP + tl.arange(0, STEP)
    channel = tl.arange(0, BLOCK)
    known = channel < channels
    inside = (pixel < pixels)[:, None] & known[None, :]
    at = pixel[:, None] * channels + channel[None, :]
    row = moments_ptr + batch * 2 * channels + channel
    mean = tl.load(row, mask=known, other=0.0)
    factor = tl.load(row + channels, mask=known, other=0.0)
    bias = tl.load(bias_ptr + channel, mask=known, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + batch * x_batch + at, mask=inside, other=0.0).to(tl.float32)
    out = (x - mean[None, :]) * factor[None, :] + bias[None, :]
    if SILU:
        out = out / (1.0 + tl.exp(-out))
    tl.store(out_ptr + batch * out_batch + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def takes(x: Tensor) -> bool:
    """Whether the channels of ``x`` lie side by side, and few enough for a program."""
    fits = x.dtype in (torch.float32, torch.bfloat16, torch.float16) and x.shape[1] <= ELEMENTS
    return fits and x[0].movedim(0, -1).is_contiguous()


def launch(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool) -> Tensor:
    """x [B, C, ...] with channels innermost; the result lies like it."""
    count, channels = x.shape[:2]
    pixels, width = x[0, 0].numel(), channels // groups
    block = _filled_up(channels)
    step = max(1, ELEMENTS // block)
    tiles = _parts(pixels, step)
    rounds = _rounds(tiles, MOST_SPANS)
    spans = _parts(tiles, rounds)
    sums = torch.empty(count, spans, 2, channels, dtype=torch.float32, device=x.device)
    moments = torch.empty(count, 2, channels, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)
    _sums[(spans, count)](
        x, sums, pixels, channels, x.stride(0),
        ROUNDS=rounds, STEP=step, BLOCK=block, num_warps=4,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    _moments[(groups, count)](
        x, sums, weight, moments, spans, pixels, channels, width, x.stride(0), eps,
        ROUNDS=_rounds(spans, SPANS_AT_ONCE), STEP=SPANS_AT_ONCE,
        BLOCK=_filled_up(width), num_warps=4,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    _normalize[(tiles, count)](
        x, moments, bias, out, pixels, channels, x.stride(0), out.stride(0),
        SILU=silu, STEP=step, BLOCK=block, num_warps=4,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return out


def _rounds(items: int, at_once: int) -> int:
    """How many times ``at_once`` are all; a power of two, so that few sizes are compiled."""
    return _filled_up(_parts(items, at_once))


def _parts(items: int, at_once: int) -> int:
    return -(-items // at_once)


def _filled_up(size: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << (size - 1).bit_length()
