"""Stored tensors on their way into eight-bit weights, and stored eight-bit weights out of them."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.layers.ops.fp8_rows import E4M3, wide
from sglang.multimodal_gen.runtime.layers.quantization.fp8 import Fp8Method
from sglang.multimodal_gen.runtime.layers.shard import Shard
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError


def eight_bit(
    value: Tensor, scale: Tensor | None, method: Fp8Method, shard: Shard | None, name: str
) -> tuple[Tensor, Tensor]:
    """A parameter's values and scales, from what this rank reads of a stored weight.

    What is stored in eight bits keeps its bits: with the whole's scales where there are some, of
    which the rank takes those of its rows, else with ones. Anything else is quantised; a rank's
    scales are then those of its slice, which where inputs are split are finer than the whole's.

    Raises:
        CheckpointError: scales of rows are stored, and one for the tensor is asked for.
    """
    if value.dtype != E4M3:
        return method.quantize_weight(value)
    rows = value.shape[0]
    if scale is None:
        scale = torch.ones(1)
    scale = scale.to(value.device, torch.float32).reshape(-1)
    if not method.by_row:
        if scale.numel() > 1:
            raise CheckpointError(
                f"{name!r} is stored with a scale for each row; use --quantization fp8, not "
                "fp8-tensor"
            )
        return value, scale.clone()
    if scale.numel() == 1:
        return value, scale.expand(rows).clone()
    return value, (shard.of(scale) if shard is not None and shard.dim == 0 else scale).clone()


def widened(value: Tensor, scale: Tensor, shard: Shard | None, dtype: torch.dtype) -> Tensor:
    """What a stored eight-bit weight means, for a parameter that is not held so."""
    scale = scale.to(value.device, torch.float32).reshape(-1)
    if scale.numel() > 1 and shard is not None and shard.dim == 0:
        scale = shard.of(scale)
    return (wide(value) * scale.reshape(-1, *(1,) * (value.ndim - 1))).to(dtype)
