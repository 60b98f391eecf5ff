"""Adaptive layer norm: shift, scale and gate computed from a conditioning vector.

DiT, "Scalable Diffusion Models with Transformers" (Peebles and Xie, 2023), section 3.2, adaLN-Zero.
All norms here are without affine parameters, eps 1e-6. The conditioning vector arrives *after* its
SiLU: the trunk applies it once for all blocks (the reference applies it in each of FLUX's 57).

In its place a modulation takes what its linear makes of it, where that was made before (for several
steps at once, ``cache/step_table.py``): *conditioning* here is either, and told by its width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.ops.fp8_rows import FEW_ROWS
from sglang.multimodal_gen.runtime.layers.ops.norm_modulate import norm_modulate


class AdaLN(NamedTuple):
    """What modulates one sub-layer; each [B, 1, D]."""

    shift: Tensor
    scale: Tensor
    gate: Tensor


def shares(conditioning_BC: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """What each of several modulations is handed, whose linears give these widths: the vector
    itself; or of rows made before, which lie end to end, its own."""
    if conditioning_BC.shape[-1] != sum(widths):
        return (conditioning_BC,) * len(widths)
    return conditioning_BC.split(list(widths), dim=-1)


def rows_of(conditioning_BC: Tensor, linear: Any, width: int) -> Tensor:
    """What a modulation's linear (of any kind) makes of the conditioning vector, [B, width], unless
    it is that already.

    Raises:
        ValueError: it is as wide as neither.
    """
    given, taken = conditioning_BC.shape[-1], linear.in_features
    if given == width:
        return conditioning_BC
    if given != taken:
        raise ValueError(
            f"conditioning of {given} numbers: a vector has {taken}, rows have {width}"
        )
    return in_full_company(linear, conditioning_BC)


def _refuse_alike(conditioning_dim: int, width: int) -> None:
    """A vector and rows are told apart by their width."""
    if conditioning_dim == width:
        raise ValueError(f"a conditioning vector as wide as what is made of it ({width})")


def in_full_company(make: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """What ``make`` gives for inputs with images first (None allowed), computed among `FEW_ROWS`
    rows, of which those that are missing are zeros.

    Libraries choose a product's kernel by its number of rows, so that a row's last bits depend on
    how many come with it. Here they do not: one step's row in a forward and the same row in a table
    of several steps are equal. It takes no longer: the product waits for its weight. An input of
    one image beside others of several is all images'.
    """
    count = max(len(x) for x in inputs if x is not None)
    if count >= FEW_ROWS:
        return make(*inputs)
    missing = FEW_ROWS - count
    whole = [None if x is None else x.expand(count, *x.shape[1:]) for x in inputs]
    full = [None if x is None else F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing)) for x in whole]
    return make(*full)[:count]


class AdaLayerNormZero(nn.Module):
    """The modulation of one block: ``count`` triples of shift, scale, gate from one linear.

    Checkpoint name: ``linear`` [3 * count * D, D]. Chunk order as Diffusers' ``AdaLayerNormZero``
    (count 2: attention, then feed-forward) and ``AdaLayerNormZeroSingle`` (count 1).
    """

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.width = 3 * count * dim
        self.linear = nn.Linear(dim, self.width)

    def rows(self, conditioning_BC: Tensor) -> Tensor:
        """All of them, [B, width]."""
        return rows_of(conditioning_BC, self.linear, self.width)

    def forward(self, conditioning_BC: Tensor) -> tuple[AdaLN, ...]:
        """Triples, each member [B, 1, D]."""
        chunks = self.rows(conditioning_BC)[:, None].chunk(3 * self.count, dim=-1)
        return tuple(AdaLN(*chunks[3 * i : 3 * i + 3]) for i in range(self.count))


class AdaLayerNormContinuous(nn.Module):
    """The last norm of a DiT. Its linear gives *scale first*, then shift (Diffusers' order)."""

    def __init__(self, dim: int, conditioning_dim: int) -> None:
        super().__init__()
        self.width = 2 * dim
        _refuse_alike(conditioning_dim, self.width)
        self.linear = nn.Linear(conditioning_dim, self.width)

    def rows(self, conditioning_BC: Tensor) -> Tensor:
        """Scale and shift, [B, width]."""
        return rows_of(conditioning_BC, self.linear, self.width)

    def forward(self, x_BSD: Tensor, conditioning_BC: Tensor) -> Tensor:
        """Norm and modulate; [B, S, D] -> [B, S, D]."""
        scale_B1D, shift_B1D = self.rows(conditioning_BC)[:, None].chunk(2, dim=-1)
        return norm_modulate(x_BSD, shift_B1D, scale_B1D)
