"""How far two tensors are apart."""

from __future__ import annotations

from torch import Tensor

FORWARD_LIMIT = 1e-5
"""Relative L2 of one forward pass, fp32 (and of all that goes into it)."""
FINAL_LIMIT = 1e-4
"""Relative L2 of the latents at the end of the loop, and of the picture made of them."""


def relative_l2(measured: Tensor, expected: Tensor) -> float:
    """``|measured - expected| / |expected|``; infinite if shapes differ or a value is NaN."""
    if measured.shape != expected.shape:
        return float("inf")
    difference = (measured.double() - expected.double()).norm().item()
    if difference == 0:
        return 0.0
    scale = expected.double().norm().item()
    ratio = difference / scale if scale else float("inf")
    return ratio if ratio == ratio else float("inf")


def largest_difference(measured: Tensor, expected: Tensor) -> float:
    """Largest absolute difference of two pictures; infinite if shapes differ or a value is NaN."""
    if measured.shape != expected.shape:
        return float("inf")
    worst = (measured.double() - expected.double()).abs().max().item()
    return worst if worst == worst else float("inf")
