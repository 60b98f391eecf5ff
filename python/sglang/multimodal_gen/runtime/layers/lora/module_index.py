"""Where the module names of adapter files lead in one component.

A name is tried as a path in the module tree (which has Diffusers' names), as such a path with
underscores for dots, and in the table ``lora_names`` of the model's class, for files that were made
for the authors' own code. A row of that table::

    "double.{}.qkv": ("blocks.{}.to_q", "blocks.{}.to_k", "blocks.{}.to_v")

``{}`` stands for a number. Several targets share the rows of the file's B in order, each as many as
it has outputs. ``"norm.linear[1/2]"`` is the second half of a target's rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

LoRANames = Mapping[str, str | tuple[str, ...]]

_TARGET = re.compile(r"(?P<path>[^\[]+)(\[(?P<part>\d+)/(?P<parts>\d+)\])?")


@dataclass(frozen=True, slots=True)
class Place:
    """Rows ``start`` to ``stop`` of the linear at ``path``."""

    path: str
    start: int
    stop: int


class ModuleIndex:
    """The linears of one component, and every name that leads to them."""

    def __init__(self, module: nn.Module) -> None:
        self.linears: dict[str, nn.Linear] = {
            path: child for path, child in module.named_modules() if isinstance(child, nn.Linear)
        }
        self._underscored = {path.replace(".", "_"): path for path in self.linears}
        names: LoRANames = getattr(type(module), "lora_names", None) or {}
        self._table = [
            (_pattern(name), (targets,) if isinstance(targets, str) else targets)
            for name, targets in names.items()
        ]

    def places(self, name: str) -> tuple[Place, ...]:
        """Where a file's module name leads, in the order of its rows; empty if nowhere."""
        # Some libraries' text encoders have one wrapper more than others.
        for spelled in (name, re.sub(r"^text_model[._]", "", name)):
            path = spelled if spelled in self.linears else self._underscored.get(spelled)
            if path is not None:
                return (Place(path, 0, self.linears[path].out_features),)
        for pattern, targets in self._table:
            if match := pattern.fullmatch(name):
                return self._resolved(targets, match.groups())
        return ()

    def _resolved(self, targets: tuple[str, ...], numbers: tuple[str, ...]) -> tuple[Place, ...]:
        places = []
        for target in targets:
            match = _TARGET.fullmatch(target.format(*numbers))
            assert match is not None, target
            linear = self.linears.get(match["path"])
            if linear is None:
                return ()
            part, parts = int(match["part"] or 0), int(match["parts"] or 1)
            rows = linear.out_features // parts
            places.append(Place(match["path"], part * rows, (part + 1) * rows))
        return tuple(places)


def _pattern(name: str) -> re.Pattern[str]:
    escaped = re.escape(name).replace(r"\{\}", r"(\d+)").replace(r"\.", "[._]")
    return re.compile(escaped)
