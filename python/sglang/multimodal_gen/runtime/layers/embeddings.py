"""Embeddings of scalars: time, guidance, and vectors beside them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SINUSOID_CHANNELS = 256


def sinusoid(value_B: Tensor, channels: int = SINUSOID_CHANNELS, *, scale: float = 1.0) -> Tensor:
    """``[cos(s v f), sin(s v f)]`` with ``f_j = 10000 ** (-j / half)``; float32 [B, channels].

    Reference: Diffusers' ``Timesteps(flip_sin_to_cos=True, downscale_freq_shift=0, scale=s)``.
    """
    half = channels // 2
    exponent = torch.arange(half, dtype=torch.float32, device=value_B.device) / half
    frequency = torch.exp(-math.log(10_000) * exponent)
    angle = scale * (value_B.float()[:, None] * frequency)
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


class EmbeddingMLP(nn.Module):
    """Linear, SiLU, linear; checkpoint names ``linear_1`` and ``linear_2``."""

    def __init__(self, in_channels: int, dim: int, *, bias: bool = True) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_channels, dim, bias=bias)
        self.linear_2 = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, in_channels] -> [B, dim]."""
        return self.linear_2(F.silu(self.linear_1(x)))
