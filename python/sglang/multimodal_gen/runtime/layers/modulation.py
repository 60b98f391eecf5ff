"""Adaptive layer norm: shift, scale and gate computed from a conditioning vector.

DiT, "Scalable Diffusion Models with Transformers" (Peebles and Xie, 2023), section 3.2, adaLN-Zero.
All norms here are without affine parameters, eps 1e-6. The conditioning vector arrives *after* its
SiLU: the trunk applies it once for all blocks (the reference applies it in each of FLUX's 57).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.ops.norm_modulate import norm_modulate


class AdaLN(NamedTuple):
    """What modulates one sub-layer; each [B, 1, D]."""

    shift: Tensor
    scale: Tensor
    gate: Tensor


class AdaLayerNormZero(nn.Module):
    """The modulation of one block: ``count`` triples of shift, scale, gate from one linear.

    Checkpoint name: ``linear`` [3 * count * D, D]. Chunk order as Diffusers' ``AdaLayerNormZero``
    (count 2: attention, then feed-forward) and ``AdaLayerNormZeroSingle`` (count 1).
    """

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.linear = nn.Linear(dim, 3 * count * dim)

    def forward(self, silu_temb_BD: Tensor) -> tuple[AdaLN, ...]:
        """Triples, each member [B, 1, D]."""
        chunks = self.linear(silu_temb_BD)[:, None].chunk(3 * self.count, dim=-1)
        return tuple(AdaLN(*chunks[3 * i : 3 * i + 3]) for i in range(self.count))


class AdaLayerNormContinuous(nn.Module):
    """The last norm of a DiT. Its linear gives *scale first*, then shift (Diffusers' order)."""

    def __init__(self, dim: int, conditioning_dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(conditioning_dim, 2 * dim)

    def forward(self, x_BSD: Tensor, silu_temb_BD: Tensor) -> Tensor:
        """Norm and modulate; [B, S, D] -> [B, S, D]."""
        scale_B1D, shift_B1D = self.linear(silu_temb_BD)[:, None].chunk(2, dim=-1)
        return norm_modulate(x_BSD, shift_B1D, scale_B1D)
