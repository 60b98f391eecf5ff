"""Where a loader puts weights that do not simply go to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.memory.weight_group import WeightSpec


class WeightHome(Protocol):
    """Takes the weights of one component, one by one, while they are read."""

    def prepare(self, module: nn.Module, specs: Sequence[WeightSpec]) -> None:
        """Make places for all parameters of a module that was built on meta."""
        ...

    def take(
        self, names: Sequence[str], pieces: Sequence[Tensor], dim: int, dtype: torch.dtype
    ) -> bool:
        """Copy one tensor to its place; False if it is to go to the device as usual.

        ``pieces`` along ``dim`` make up the tensor, of which this rank may hold a slice.
        """
        ...

    def finish(self) -> None:
        """All of them are there."""
        ...
