"""Rotary position embedding over several axes (RoFormer, Su et al. 2021; axial form as in FLUX)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """Angles of each position: ``cos`` and ``sin``, both float32 [S, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


def axial_rotary(position_ids_SA: Tensor, axes_dims: Sequence[int], theta: float) -> Rotary:
    """The angles of positions with A axes; axis ``a`` owns ``axes_dims[a]`` of a head's channels.

    The frequencies ``theta ** (-2j / dim)`` and the angles are float64: at position 4,000 a float32
    angle is off by 1e-4 radians.
    """
    angles = []
    for axis, dim in enumerate(axes_dims):
        exponent = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        frequency = (theta**-exponent).to(position_ids_SA.device)
        angles.append(torch.outer(position_ids_SA[:, axis].double(), frequency))
    angle = torch.cat(angles, dim=-1)
    return Rotary(angle.cos().float(), angle.sin().float())


def rotate_pairs(x_BSHD: Tensor, rotary: Rotary) -> Tensor:
    """Rotate neighbouring channels ``(x0, x1) -> (x0 c - x1 s, x1 c + x0 s)`` in float32.

    Eagerly the pair is one complex number: three kernels in place of nine. The compiler fuses the
    real form and does not generate code for complex numbers, so it gets that one.
    """
    pairs = x_BSHD.float().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        x0, x1 = pairs.unbind(-1)
        cos, sin = rotary.cos[:, None], rotary.sin[:, None]
        rotated = torch.stack((x0 * cos - x1 * sin, x1 * cos + x0 * sin), dim=-1)
    else:
        turn_S1d = torch.complex(rotary.cos, rotary.sin)[:, None]
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * turn_S1d)
    return rotated.flatten(-2).to(x_BSHD.dtype)
