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

import math
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
            if alpha_pattern_of(pattern).match(module):
                return alpha
        return self.alpha


def alpha_pattern_of(expression: str) -> re.Pattern[str]:
    """What a key of ``alpha_pattern`` matches; raises as `re.compile`."""
    return re.compile(rf"(.*\.)?({expression})$")


NO_CONFIG = AdapterConfig()


@dataclass(frozen=True, slots=True)
class NormalForm:
    """An adapter on the modules of a pipeline, and what of its file it does not use.

    ``unmatched`` tensors name a module that no component has; ``unsupported`` ones are of a kind
    that is not applied (biases, differences, convolutions) or lack their counterpart; ``reasons``
    say why, for one tensor of each module that has such a pair.
    """

    layers: Mapping[str, Mapping[str, LowRank]]
    styles: tuple[str, ...]
    alpha_sources: tuple[AlphaSource, ...]
    matched: tuple[str, ...]
    unmatched: tuple[str, ...]
    unsupported: tuple[str, ...]
    reasons: Mapping[str, str] = field(default_factory=dict)


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
        CheckpointError: a factor's shape does not fit its module, two keys change one module, a
            factor or an alpha holds NaN or infinity or is none, or the change is too large for the
            weights.
    """
    return _Builder(tensors, components, configs, label).build()


def checked_values(label: str, name: str, tensor: Tensor) -> Tensor:
    """A factor or an alpha in a dtype to compute in: eight-bit ones are widened.

    Raises:
        CheckpointError: it holds NaN or infinity, or numbers of a kind that no factor has.
    """
    if tensor.is_complex() or tensor.dtype == torch.bool:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(f"{label}: tensor {name!r} is {kind}; LoRA factors are real numbers.")
    wide = tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
    if not torch.isfinite(wide).all():
        raise CheckpointError(f"{label}: tensor {name!r} holds NaN or infinity.")
    return wide


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
        self.reasons: dict[str, str] = {}
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
            reasons=self.reasons,
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
        problem = self._pair_problem(group)
        if problem is not None:
            self.unsupported += names
            name, reason = problem
            self.reasons[name] = reason
            return
        factors = self._factors(component, module, group)
        for target, places in found:
            self._check_shapes(target, places, factors, group)
            self._put(target, places, factors, group)
        self.matched += names
        self.styles.add(group.style)

    def _pair_problem(self, group: _Group) -> tuple[str, str] | None:
        """Why a module's tensors are not two matrices and a scale: the name of one, and what is
        wrong with it; None if they are."""
        for part, named in (("down", "lora_A (lora_down)"), ("up", "lora_B (lora_up)")):
            if part not in group.parts:
                return next(iter(group.parts.values())), f"has no {named} beside it"
        names = group.parts["down"], group.parts["up"]
        for name in names:
            if self.tensors[name].ndim != 2:
                return name, f"is no matrix, but of shape {list(self.tensors[name].shape)}"
        ranks = self.tensors[names[0]].shape[0], self.tensors[names[1]].shape[1]
        if ranks[0] != ranks[1]:
            return names[0], f"has rank {ranks[0]}, and {names[1]!r} rank {ranks[1]}"
        if not ranks[0]:
            return names[0], "has rank 0"
        alpha = group.parts.get("alpha")
        if alpha is not None and self.tensors[alpha].numel() != 1:
            return alpha, "is not one number"
        return None

    def _factors(self, component: str, module: str, group: _Group) -> LowRank:
        """The factors as stored, scaled by the rules of this module."""
        values = {
            part: checked_values(self.label, name, self.tensors[name])
            for part, name in group.parts.items()
        }
        down, up = values["down"], values["up"]
        if "alpha" in values:
            self.sources.add("alpha keys")
            return LowRank(down, up, float(values["alpha"].item()))
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
            self._check_size(target, path, layers[path], group)

    def _check_size(self, target: str, path: str, factors: LowRank, group: _Group) -> None:
        """A change that the weight's dtype cannot hold would make every picture NaN."""
        dtype = self.components[target].linears[path].weight.dtype
        limit = torch.finfo(dtype).max if dtype.is_floating_point and dtype.itemsize > 1 else 3e38
        scaled = factors.up.abs().max().double().item() * abs(factors.scaling)
        size = max(factors.norm(), scaled, factors.down.abs().max().double().item())
        if not math.isfinite(size) or size > limit:
            name = group.parts.get("alpha", group.parts["up"])
            raise CheckpointError(
                f"{self.label}: {name!r} makes a change of size {size:.3g} of {path} (scaled by "
                f"{factors.scaling:.3g}), which {str(dtype).removeprefix('torch.')} cannot hold."
            )
