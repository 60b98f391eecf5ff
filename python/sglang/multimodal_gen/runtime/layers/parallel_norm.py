"""Group norm over a picture whose rows are spread over ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.row_shard import RowShards


def group_norm_rows(norm: nn.GroupNorm, shards: RowShards, x: Tensor) -> Tensor:
    """What ``norm`` makes of the whole map, this rank's part: ``x`` is its band [B, C, ...].

    One small exchange: two numbers for each group. Statistics are in float32 whatever the dtype,
    and the map is read and written, never held a second time in float32.
    """
    mean, variance = shards.whole_moments(*_moments(x.unflatten(1, (norm.num_groups, -1))))
    inverse = torch.rsqrt(variance + norm.eps)
    repeats = x.shape[1] // norm.num_groups
    scale, mean = (v.repeat_interleave(repeats, 1) for v in (inverse, mean))
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -mean * scale
    if norm.bias is not None:
        shift = shift + norm.bias
    # One pass, computed in float32, that writes the map's dtype.
    scale, shift = (v.view(*v.shape, *(1,) * (x.ndim - 2)) for v in (scale, shift))
    return torch.addcmul(shift, x, scale, out=torch.empty_like(x))


def _moments(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance [B, G] of each group [B, G, ...], at least in float32."""
    dims = tuple(range(2, groups.ndim))
    if groups.dtype in (torch.float32, torch.float64):
        variance, mean = torch.var_mean(groups, dims, correction=0)
        return mean, variance
    # Sums of half-precision numbers lose less in float32 than the numbers did when rounded.
    count = groups[0, 0].numel()
    mean = groups.sum(dims, dtype=torch.float32) / count
    square = torch.linalg.vector_norm(groups, 2, dims, dtype=torch.float32).square() / count
    return mean, (square - mean.square()).clamp_min(0)
