"""One component with its adapters: what is in force on its linears."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.linear import ParallelLinear
from sglang.multimodal_gen.runtime.layers.lora.lora_linear import LoRALinear
from sglang.multimodal_gen.runtime.layers.lora.low_rank import LowRank, Term
from sglang.multimodal_gen.runtime.layers.lora.module_index import ModuleIndex

Terms = Mapping[str, Sequence[Term]]
"""Path of a linear -> the terms added to it."""


_Act = Callable[[LoRALinear, Sequence[Term]], object]


class AdaptedModule:
    """A component whose linears can take low-rank terms. No terms: exactly the base.

    Each change replaces all terms. One that fails leaves the base. Where linears are dealt over
    ranks, every rank makes the same changes in the same order, and figures are those of the whole.

    Args:
        module: the component.
        device: where sums over ranks are made.
    """

    def __init__(self, module: nn.Module, device: str | torch.device = "cpu") -> None:
        self.index = ModuleIndex(module)
        self._device = device
        self._changed: dict[str, LoRALinear] = {}

    @property
    def runs_live_only(self) -> bool:
        """Whether weights are spread over ranks, or some held in eight bits."""
        linears = [LoRALinear(linear) for linear in self.index.linears.values()]
        return any(linear.is_sharded or linear.is_quantized for linear in linears)

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
        figures: list[tuple[LoRALinear, tuple[float, ...]]] = []
        self._each(terms, lambda method, parts: figures.append((method, method.merge(parts))))
        lost, size = self._summed(figures, 2)
        return (lost / size) ** 0.5 if size else 0.0

    def relative_change(self, layers: Mapping[str, LowRank]) -> float:
        """``|scaling * B A| / |W|`` over the linears of an adapter, W the base."""
        change = sum(factors.norm() ** 2 for factors in layers.values())
        figures = []
        for path in layers:
            method = self._changed.get(path) or LoRALinear(self.index.linears[path])
            norm = torch.linalg.vector_norm(method.base_weight, dtype=torch.float32).item()
            figures.append((method, (norm**2,)))
        (base,) = self._summed(figures, 1)
        if not change:
            return 0.0
        return (change / base) ** 0.5 if base else float("inf")

    def _summed(
        self, figures: Iterable[tuple[LoRALinear, tuple[float, ...]]], count: int
    ) -> list[float]:
        """Sums over linears of ``count`` figures each, those of slices over all ranks."""
        whole = [0.0] * count
        slices: dict[Group, list[float]] = {}
        for method, values in figures:
            linear = method.linear
            parts = isinstance(linear, ParallelLinear)
            sums = slices.setdefault(linear.group, [0.0] * count) if parts else whole
            sums[:] = [total + value for total, value in zip(sums, values, strict=True)]
        for group, sums in slices.items():
            summed = torch.tensor(sums, dtype=torch.float64, device=self._device)
            added = group.all_reduce(summed).tolist()
            whole = [total + value for total, value in zip(whole, added, strict=True)]
        return whole

    def _each(self, terms: Terms, act: _Act) -> None:
        self.clear()
        try:
            for path, parts in terms.items():
                method = self._changed[path] = LoRALinear(self.index.linears[path])
                act(method, parts)
        except BaseException:
            self.clear()
            raise
