"""Which adapters a component runs with, as values that can be compared and put back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sglang.multimodal_gen.runtime.layers.lora.adapted_module import Terms
from sglang.multimodal_gen.runtime.layers.lora.low_rank import LowRank, Term
from sglang.multimodal_gen.runtime.layers.lora.receipt import LoRAReceipt

Mode = Literal["off", "live", "merged"]


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter in host memory: component -> module path -> factors."""

    nickname: str
    path: Path
    stamp: tuple[int, int]
    layers: Mapping[str, Mapping[str, LowRank]]
    receipt: LoRAReceipt


@dataclass(frozen=True, slots=True)
class Selection:
    """The adapters chosen for one component, their weights, and whether they are in force.

    Chosen adapters stand in the order of their names, so that sums do not depend on the order in
    which a caller names them. ``factor`` multiplies all weights.
    """

    chosen: tuple[tuple[LoadedAdapter, float], ...] = ()
    mode: Mode = "off"
    factor: float = 1.0

    def terms(self, component: str) -> Terms:
        """What is added to each linear; adapters of weight 0 are not there at all."""
        if self.mode == "off":
            return {}
        terms: dict[str, list[Term]] = {}
        for adapter, weight in self.chosen:
            for path, factors in adapter.layers[component].items():
                if weight * self.factor != 0:
                    terms.setdefault(path, []).append(Term(factors, weight * self.factor))
        return terms

    @property
    def effective(self) -> bool:
        """Whether it changes anything."""
        weights = [weight * self.factor for _, weight in self.chosen]
        return self.mode != "off" and any(weight != 0 for weight in weights)


def select(choices: Iterable[tuple[LoadedAdapter, float]], component: str, mode: Mode) -> Selection:
    """The selection of one component: adapters that change it; one named twice counts twice."""
    weights: dict[LoadedAdapter, float] = {}
    for adapter, weight in choices:
        if component in adapter.layers:
            weights[adapter] = weights.get(adapter, 0.0) + weight
    chosen = tuple(sorted(weights.items(), key=lambda item: item[0].nickname))
    return Selection(chosen, mode if chosen else "off")
