"""The check that keeps a black picture from being called a success."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.utils.errors import FollowsFailure, NonFiniteOutput

_FINE, _NOT_FINITE, _FAILED = range(3)


def require_finite(tensor: Tensor, what: str, control: Group | None = None) -> None:
    """Refuse NaN and infinity, on all ranks of ``control`` if on one: they go on together or not.

    Raises:
        NonFiniteOutput: names whose result it is, and what to try in its precision.
        FollowsFailure: another rank failed before it had a result.
    """
    verdict = _FINE if torch.isfinite(tensor).all() else _NOT_FINITE
    worst = _worst(verdict, control)
    if worst == _FINE:
        return
    if worst == _FAILED:
        raise FollowsFailure(f"another rank failed before {what}; its own error says why")
    if tensor.dtype == torch.float32:
        remedy = "a setting is out of reason (a very large guidance?), or its weights are damaged"
    else:
        precision = str(tensor.dtype).removeprefix("torch.")
        remedy = f"it overflowed in {precision}, or its weights are damaged; try --precision fp32"
    raise NonFiniteOutput(f"{what} holds NaN or infinity: {remedy}")


def tell_failure(control: Group | None) -> None:
    """Let ranks that wait in `require_finite` know that this one has nothing to check."""
    _worst(_FAILED, control)


def _worst(verdict: int, control: Group | None) -> int:
    if control is None or control.size == 1:
        return verdict
    return int(control.all_gather(torch.tensor([verdict])).max())
