"""What a library's module returns, led back to one tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def first_tensor(output: Any) -> Tensor:
    """The tensor itself, or the first one of a tuple or an output record."""
    return output if isinstance(output, Tensor) else output[0]
