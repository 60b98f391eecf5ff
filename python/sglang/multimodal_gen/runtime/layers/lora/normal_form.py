"""Adapter files in one form: component -> module path in our model -> `LowRank`.

How an adapter is scaled, the same for all styles (and equal to Diffusers 0.42.1):

1. a tensor ``X.alpha`` of the file: ``alpha / rank``;
2. else ``lora_alpha`` (or ``alpha_pattern``, for modules that it matches) of the configuration:
   Diffusers' ``lora_adapter_metadata`` in the file's header, or PEFT's ``adapter_config.json``
   beside it: ``alpha / rank``, or ``alpha / sqrt(rank)`` with ``use_rslora``;
3. else 1: a file without any alpha means ``W + B A``.

``rank`` is that of the stored tensors, layer by layer. Kohya's ``final_layer`` keys are scaled and
applied like all others, which Diffusers' converter drops.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.layers.lora.adapter_keys import (
    AdapterKey,
    Part,
    parse_adapter_key,
)
from sglang.multimodal_gen.runtime.layers.lora.low_rank import LowRank
from sglang.multimodal_gen.runtime.layers.lora.module_index import ModuleIndex, Place
from sglang.multimodal_gen.runtime.utils.component_roles import DENOISER, is_denoiser
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

AlphaSource = Literal["alpha keys", "file metadata", "adapter_config.json", "none"]


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What a configuration says about scaling, for one component's modules."""

    source: AlphaSource = "none"
    alpha: float | None = None
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rank_stabilized: bool = False

    def alpha_of(self, module: str) -> float | None:
        """The alpha of a module, by its name in the file; patterns match as PEFT's do."""
        for pattern, alpha in self.alpha_pattern.items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return alpha
        return self.alpha


NO_CONFIG = AdapterConfig()


@dataclass(frozen=True, slots=True)
class NormalForm:
    """An adapter on the modules of a pipeline, and what of its file it does not use.

    ``unmatched`` tensors name a module that no component has; ``unsupported`` ones are of a kind
    that is not applied (biases, differences, convolutions) or lack their counterpart.
    """

    layers: Mapping[str, Mapping[str, LowRank]]
    styles: tuple[str, ...]
    alpha_sources: tuple[AlphaSource, ...]
    matched: tuple[str, ...]
    unmatched: tuple[str, ...]
    unsupported: tuple[str, ...]


def to_normal_form(
    tensors: Mapping[str, Tensor],
    components: Mapping[str, ModuleIndex],
    configs: Mapping[str, AdapterConfig],
    label: str,
) -> NormalForm:
    """Lead each tensor of a file to the modules that it changes.

    Keys that name a component change that one alone; those that name none, every denoiser.
    ``configs`` are by component, the empty name for all of them.

    Raises:
        CheckpointError: a factor's shape does not fit its module, two keys change one module, or
            a factor holds NaN or infinity.
    """
    return _Builder(tensors, components, configs, label).build()


@dataclass
class _Group:
    """The tensors that a file has for one module: part -> (tensor name, how it was read)."""

    parts: dict[Part, str] = field(default_factory=dict)
    style: str = ""


class _Builder:
    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        components: Mapping[str, ModuleIndex],
        configs: Mapping[str, AdapterConfig],
        label: str,
    ) -> None:
        self.tensors = tensors
        self.components = components
        self.configs = configs
        self.label = label
        self.layers: dict[str, dict[str, LowRank]] = {}
        self.matched: list[str] = []
        self.unmatched: list[str] = []
        self.unsupported: list[str] = []
        self.styles: set[str] = set()
        self.sources: set[AlphaSource] = set()

    def build(self) -> NormalForm:
        for (component, module), group in self._groups().items():
            self._add(component, module, group)
        return NormalForm(
            layers=self.layers,
            styles=tuple(sorted(self.styles)),
            alpha_sources=tuple(sorted(self.sources)),
            matched=tuple(sorted(self.matched)),
            unmatched=tuple(sorted(self.unmatched)),
            unsupported=tuple(sorted(self.unsupported)),
        )

    def _groups(self) -> dict[tuple[str, str], _Group]:
        groups: dict[tuple[str, str], _Group] = {}
        for name in self.tensors:
            key: AdapterKey | None = parse_adapter_key(name)
            if key is None:
                self.unsupported.append(name)
                continue
            group = groups.setdefault((key.component, key.module), _Group(style=key.style))
            if key.part in group.parts:
                raise CheckpointError(
                    f"{self.label}: {group.parts[key.part]!r} and {name!r} say the same thing."
                )
            group.parts[key.part] = name
        return groups

    def _add(self, component: str, module: str, group: _Group) -> None:
        names = list(group.parts.values())
        targets = [component] if component else [n for n in self.components if is_denoiser(n)]
        found = [
            (target, places)
            for target in targets
            if target in self.components and (places := self.components[target].places(module))
        ]
        if not found:
            self.unmatched += names
            return
        factors = self._factors(component, module, group)
        if factors is None:
            self.unsupported += names
            return
        for target, places in found:
            self._check_shapes(target, places, factors, group)
            self._put(target, places, factors, group)
        self.matched += names
        self.styles.add(group.style)

    def _factors(self, component: str, module: str, group: _Group) -> LowRank | None:
        """The factors as stored, scaled by the rules of this module; None if they are not two
        matrices."""
        if not {"down", "up"} <= group.parts.keys():
            return None
        down, up = self.tensors[group.parts["down"]], self.tensors[group.parts["up"]]
        if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1] or not down.shape[0]:
            return None
        for name in (group.parts["down"], group.parts["up"]):
            if not torch.isfinite(self.tensors[name]).all():
                raise CheckpointError(f"{self.label}: tensor {name!r} holds NaN or infinity.")
        if "alpha" in group.parts:
            alpha = self.tensors[group.parts["alpha"]]
            if alpha.numel() != 1:
                return None
            self.sources.add("alpha keys")
            return LowRank(down, up, float(alpha.item()))
        config = self.configs.get(component or DENOISER) or self.configs.get("") or NO_CONFIG
        self.sources.add(config.source)
        return LowRank(down, up, config.alpha_of(module), config.rank_stabilized)

    def _check_shapes(
        self, target: str, places: tuple[Place, ...], factors: LowRank, group: _Group
    ) -> None:
        linears = self.components[target].linears
        rows = sum(place.stop - place.start for place in places)
        width = linears[places[0].path].in_features
        if (factors.up.shape[0], factors.down.shape[1]) != (rows, width):
            paths = ", ".join(dict.fromkeys(place.path for place in places))
            raise CheckpointError(
                f"{self.label}: {group.parts['down']!r} and {group.parts['up']!r} change a matrix "
                f"[{factors.up.shape[0]}, {factors.down.shape[1]}], but {paths} of {target!r} has "
                f"[{rows}, {width}]. The adapter was made for another model."
            )

    def _put(self, target: str, places: tuple[Place, ...], factors: LowRank, group: _Group) -> None:
        """Share the rows of B out to the places; a place may be some rows of its linear."""
        layers = self.layers.setdefault(target, {})
        ups: dict[str, Tensor] = {}
        row = 0
        for place in places:
            count = place.stop - place.start
            outputs = self.components[target].linears[place.path].out_features
            if place.path not in ups:
                ups[place.path] = factors.up.new_zeros(outputs, factors.rank)
            ups[place.path][place.start : place.stop] = factors.up[row : row + count]
            row += count
        for path, up in ups.items():
            if path in layers:
                raise CheckpointError(
                    f"{self.label}: {group.parts['down']!r} changes {path} of {target!r}, which "
                    "another key of the file changes too."
                )
            layers[path] = LowRank(factors.down, up, factors.alpha, factors.rank_stabilized)
