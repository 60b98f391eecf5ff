"""One component with its adapters: what is in force on its linears."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from sglang.multimodal_gen.runtime.layers.lora.lora_linear import LoRALinear
from sglang.multimodal_gen.runtime.layers.lora.low_rank import LowRank, Term
from sglang.multimodal_gen.runtime.layers.lora.module_index import ModuleIndex

Terms = Mapping[str, Sequence[Term]]
"""Path of a linear -> the terms added to it."""


_Act = Callable[[LoRALinear, Sequence[Term]], None]


class AdaptedModule:
    """A component whose linears can take low-rank terms. No terms: exactly the base.

    Each change replaces all terms. One that fails leaves the base.
    """

    def __init__(self, module: nn.Module) -> None:
        self.index = ModuleIndex(module)
        self._changed: dict[str, LoRALinear] = {}

    @property
    def is_sharded(self) -> bool:
        """Whether weights are spread over ranks: adapters then run live only."""
        return any(hasattr(linear.weight, "to_local") for linear in self.index.linears.values())

    def clear(self) -> None:
        """Back to the base, bit for bit."""
        for method in self._changed.values():
            method.clear()
        self._changed = {}

    def run_live(self, terms: Terms) -> None:
        """Add terms to the linears' outputs."""
        self._each(terms, lambda method, parts: method.run_live(parts))

    def merge(self, terms: Terms) -> float:
        """Put terms into the weights; returns the share of the change that rounding took, 0..1."""
        sums = [0.0, 0.0]

        def merge_one(method: LoRALinear, parts: Sequence[Term]) -> None:
            lost, size = method.merge(parts)
            sums[0] += lost
            sums[1] += size

        self._each(terms, merge_one)
        return (sums[0] / sums[1]) ** 0.5 if sums[1] else 0.0

    def relative_change(self, layers: Mapping[str, LowRank]) -> float:
        """``|scaling * B A| / |W|`` over the linears of an adapter, W the base."""
        change = sum(factors.norm() ** 2 for factors in layers.values())
        base = 0.0
        for path in layers:
            method = self._changed.get(path) or LoRALinear(self.index.linears[path])
            norm = torch.linalg.vector_norm(method.base_weight, dtype=torch.float32).item()
            base += norm**2
        return (change / base) ** 0.5 if base else float("inf")

    def _each(self, terms: Terms, act: _Act) -> None:
        self.clear()
        try:
            for path, parts in terms.items():
                method = self._changed[path] = LoRALinear(self.index.linears[path])
                act(method, parts)
        except BaseException:
            self.clear()
            raise
