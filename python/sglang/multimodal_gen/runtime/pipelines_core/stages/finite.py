"""The check that keeps a black picture from being called a success."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.utils.errors import NonFiniteOutput


def require_finite(tensor: Tensor, what: str) -> None:
    """Refuse NaN and infinity.

    Raises:
        NonFiniteOutput: names whose result it is, and what to try in its precision.
    """
    if torch.isfinite(tensor).all():
        return
    if tensor.dtype == torch.float32:
        remedy = "a setting is out of reason (a very large guidance?), or its weights are damaged"
    else:
        precision = str(tensor.dtype).removeprefix("torch.")
        remedy = f"it overflowed in {precision}, or its weights are damaged; try --precision fp32"
    raise NonFiniteOutput(f"{what} holds NaN or infinity: {remedy}")
