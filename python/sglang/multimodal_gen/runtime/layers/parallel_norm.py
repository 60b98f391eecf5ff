"""Group norm over a picture whose rows are spread over ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.row_shard import RowShards


def group_norm_rows(norm: nn.GroupNorm, shards: RowShards, x: Tensor) -> Tensor:
    """What ``norm`` makes of the whole map, this rank's part: ``x`` is its band [B, C, ...].

    One small exchange: two numbers for each group. Statistics are in float32 whatever the dtype,
    and the map is read and written, never held a second time in float32.
    """
    batch, channels = x.shape[:2]
    mean, variance = shards.whole_moments(*_moments(x.unflatten(1, (norm.num_groups, -1))))
    repeats = channels // norm.num_groups
    # A batch norm with given statistics is the same affine map a channel, in one pass.
    flat = F.batch_norm(
        x.reshape(1, batch * channels, *x.shape[2:]),
        mean.repeat_interleave(repeats, 1).flatten(),
        variance.repeat_interleave(repeats, 1).flatten(),
        _per_image(norm.weight, batch, mean.dtype),
        _per_image(norm.bias, batch, mean.dtype),
        training=False,
        eps=norm.eps,
    )
    return flat.view(x.shape) if batch > 1 else flat


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


def _per_image(weight: Tensor | None, batch: int, dtype: torch.dtype) -> Tensor | None:
    return None if weight is None else weight.to(dtype).repeat(batch)
