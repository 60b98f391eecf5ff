"""Norms over a width that is dealt over ranks: q/k norms that span all heads.

Legend: D width, G ranks of the group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.shard import Shard, sharded


class NormAcrossHeads(nn.Module):
    """RMS or layer norm of [..., D / G] with the statistics of all D; one collective a call.

    Statistics are float32. The variance of the whole is put together from each rank's mean and
    variance (Chan et al., 1979): a sum of squares would lose the digits of a large mean.

    Args:
        whole: an ``nn.RMSNorm`` or ``nn.LayerNorm`` over one dimension of D.
        group: the ranks that share D, in order and in equal pieces.
    """

    def __init__(self, whole: nn.RMSNorm | nn.LayerNorm, group: Group) -> None:
        super().__init__()
        self.normalized_shape, self.eps = whole.normalized_shape, whole.eps
        self.centered = isinstance(whole, nn.LayerNorm)
        self.group = group
        (width,) = self.normalized_shape
        shard = Shard(0, (width,), group.rank, group.size)
        bias = getattr(whole, "bias", None)
        self.weight = None if whole.weight is None else sharded(whole.weight, shard)
        self.bias = None if bias is None else sharded(bias, shard)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D / G] -> [..., D / G]."""
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        wide = x.float()
        if self.centered:
            mean, variance = self._moments(wide)
            normed = (wide - mean) * torch.rsqrt(variance + eps)
        else:
            square = self.group.all_reduce(wide.square().mean(-1, keepdim=True))
            normed = wide * torch.rsqrt(square / self.group.size + eps)
        if self.weight is not None:
            normed = normed * self.weight
        if self.bias is not None:
            normed = normed + self.bias
        return normed.to(x.dtype)

    def _moments(self, wide: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the whole width, each [..., 1]."""
        variance, mean = torch.var_mean(wide, dim=-1, correction=0)
        # One row a rank: [G, 2, ...].
        rows = self.group.all_gather(torch.stack((mean, variance))[None], dim=0)
        means, variances = rows[:, 0], rows[:, 1]
        mean = means.mean(0)
        variance = variances.mean(0) + (means - mean).square().mean(0)
        return mean[..., None], variance[..., None]
