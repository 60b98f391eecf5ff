"""Which step cache a request uses: methods, thresholds, and how a request's wish is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

StepCacheMethod = Literal["first-block", "teacache"]
"""``first-block``: by how much the first block's own contribution changed since it was last kept.
``teacache``: by how much the first block's modulated input changed, step by step (Liu et al. 2024).
"""
StepCacheWish = Literal["off", "first-block", "teacache"]

OFF = "off"
METHODS: tuple[str, ...] = get_args(StepCacheMethod)
DEFAULT_THRESHOLDS: dict[str, float] = {"first-block": 0.12, "teacache": 0.3}
"""What is used where neither a request nor the server says another (docs/performance.md)."""


@dataclass(frozen=True, slots=True)
class StepCacheChoice:
    """A step cache that is on: its method, and the change from which blocks are computed again."""

    method: str
    threshold: float


def threshold_problem(value: object) -> str | None:
    """What is wrong with a threshold; None if nothing is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "must be a number"
    if not 0 <= value < math.inf:
        return "must be a finite number, at least 0; 0 reuses nothing"
    return None


def chosen(
    wish: str | None, threshold: float | None, default: StepCacheChoice | None
) -> StepCacheChoice | None:
    """The cache that a request gets: its own ``wish``, or the server's ``default``; None is off.

    A threshold that is left out is the server's where the method is the server's, else the
    method's own.
    """
    method = (default.method if default is not None else OFF) if wish is None else wish
    if method == OFF:
        return None
    if threshold is None:
        same = default is not None and default.method == method
        threshold = default.threshold if same and default else DEFAULT_THRESHOLDS[method]
    return StepCacheChoice(method, float(threshold))
