"""Tensor parallelism as a table at the end of a model's file.

A row gives a pattern of module paths (``fnmatch``; ``*`` crosses dots) and what becomes of those
modules on several ranks; a module that no row matches stays whole on every rank::

    TP_PLAN = {
        "blocks.*.attn.to_[qkv]": Column(heads="num_attention_heads"),
        "blocks.*.attn.to_out": Row(),
        "blocks.*.ff.up": Column(),
        "blocks.*.ff.down": Row(),
    }

The table is met once, on the meta device, before weights are read. Forwards infer head counts from
the widths that they see, and so compute on as many heads as this rank has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.multimodal_gen.runtime.layers.model_table import table_of
from sglang.multimodal_gen.runtime.layers.norm_across_heads import NormAcrossHeads
from sglang.multimodal_gen.runtime.layers.parallel_embedding import (
    ColumnParallelEmbedding,
    VocabParallelEmbedding,
)
from sglang.multimodal_gen.runtime.layers.shard import shard_of
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError

TABLE = "TP_PLAN"

Blocks = tuple[int, ...] | tuple[str, ...]
"""Of what a packed width consists, in order: relative sizes, or linears beside the module (by path
from its parent) whose outputs it is concatenated of."""


@dataclass(frozen=True, slots=True)
class Place:
    """A module of a model, and where it hangs."""

    model: nn.Module
    path: str
    module: Any

    @property
    def parent(self) -> nn.Module:
        """The module that holds it."""
        return self.model.get_submodule(self.path.rpartition(".")[0])

    def number(self, name: str) -> int:
        """An attribute of the model, or of its ``config``, that counts something."""
        value = getattr(self.model, name, getattr(getattr(self.model, "config", None), name, None))
        if type(value) is not int:
            raise PipelineDefinitionError(
                f"{TABLE} of {type(self.model).__name__} counts {name!r}, which is no whole number "
                "of the model or its config; let the constructor keep it as an attribute"
            )
        return value

    def widths(self, blocks: Blocks, whole: int) -> tuple[int, ...]:
        """The widths of blocks that make up ``whole``."""
        if not blocks:
            return (whole,)
        sizes = [b if isinstance(b, int) else self._outputs(b) for b in blocks]
        named = any(isinstance(b, str) for b in blocks)
        unit, rest = divmod(whole, sum(sizes))
        if rest or (named and unit != 1):
            raise PipelineDefinitionError(
                f"{TABLE} of {type(self.model).__name__}: {self.path} has a width of {whole}, "
                f"which blocks={blocks} ({' + '.join(map(str, sizes))}) do not make up"
            )
        return tuple(unit * size for size in sizes)

    def _outputs(self, name: str) -> int:
        try:
            found = self.parent.get_submodule(name)
        except AttributeError:
            found = None
        if not isinstance(found, nn.Linear):
            raise PipelineDefinitionError(
                f"{TABLE} of {type(self.model).__name__}: {self.path} has a block {name!r}, which "
                "is no linear beside it"
            )
        return found.out_features


class Entry(ABC):
    """What becomes of a module on several ranks."""

    @abstractmethod
    def takes(self, module: nn.Module) -> bool:
        """Whether it can be applied to a module; a subclass of a plain one has its own forward."""

    @abstractmethod
    def counts(self, place: Place) -> Iterator[tuple[int, str]]:
        """Numbers that must divide over the ranks, and what each is."""

    @abstractmethod
    def apply(self, place: Place, group: Group) -> nn.Module:
        """The module that stands there from now on."""


@dataclass(frozen=True, slots=True)
class Column(Entry):
    """Split by outputs: a linear, or an embedding table with a column a head.

    Args:
        heads: the name of the head count, an attribute of the model or its config, where the
            outputs are heads: ranks get whole heads or the run is refused.
        blocks: see `Blocks`; for a linear whose output is split by position (fused q, k, v; gate
            and value).
        gather_output: every rank gets the whole output.
    """

    heads: str | None = None
    blocks: Blocks = ()
    gather_output: bool = False

    def __post_init__(self) -> None:
        if self.gather_output and self.blocks:
            raise PipelineDefinitionError(
                "Column(gather_output=True) gives the whole output in order; leave out blocks"
            )

    def takes(self, module: nn.Module) -> bool:
        """Plain linears; tables, where nothing is packed or gathered."""
        plain = not (self.blocks or self.gather_output)
        return type(module) is nn.Linear or (type(module) is nn.Embedding and plain)

    def counts(self, place: Place) -> Iterator[tuple[int, str]]:
        """The heads, then the outputs."""
        if self.heads is not None:
            yield _heads(place, self.heads)
        module = place.module
        whole = module.out_features if type(module) is nn.Linear else module.embedding_dim
        for width in place.widths(self.blocks, whole):
            yield width, f"{width} outputs of {place.path}"

    def apply(self, place: Place, group: Group) -> nn.Module:
        """A column-parallel linear or embedding."""
        module = place.module
        if type(module) is nn.Embedding:
            return ColumnParallelEmbedding(module, group)
        blocks = place.widths(self.blocks, module.out_features)
        return ColumnParallelLinear(module, group, blocks=blocks, gather_output=self.gather_output)


@dataclass(frozen=True, slots=True)
class Row(Entry):
    """Split by inputs, which are what column-parallel linears gave; the results are added up.

    Args:
        blocks: see `Blocks`; for a packed input, a concatenation of several sharded outputs.
    """

    blocks: Blocks = ()

    def takes(self, module: nn.Module) -> bool:
        """Plain linears."""
        return type(module) is nn.Linear

    def counts(self, place: Place) -> Iterator[tuple[int, str]]:
        """The inputs."""
        for width in place.widths(self.blocks, place.module.in_features):
            yield width, f"{width} inputs of {place.path}"

    def apply(self, place: Place, group: Group) -> nn.Module:
        """A row-parallel linear."""
        blocks = place.widths(self.blocks, place.module.in_features)
        return RowParallelLinear(place.module, group, blocks=blocks)


@dataclass(frozen=True, slots=True)
class Vocab(Entry):
    """An embedding table split by rows; they need not divide."""

    def takes(self, module: nn.Module) -> bool:
        """Plain tables; not those that renormalise their rows as they are read."""
        return type(module) is nn.Embedding and module.max_norm is None

    def counts(self, place: Place) -> Iterator[tuple[int, str]]:
        """Nothing."""
        return iter(())

    def apply(self, place: Place, group: Group) -> nn.Module:
        """A vocabulary-parallel embedding."""
        return VocabParallelEmbedding(place.module, group)


@dataclass(frozen=True, slots=True)
class NormAcross(Entry):
    """A norm over the whole of a width that is split: its statistics are those of all ranks."""

    heads: str | None = None

    def takes(self, module: Any) -> bool:
        """Norms over one dimension."""
        return type(module) in (nn.RMSNorm, nn.LayerNorm) and len(module.normalized_shape) == 1

    def counts(self, place: Place) -> Iterator[tuple[int, str]]:
        """The heads, then the width."""
        if self.heads is not None:
            yield _heads(place, self.heads)
        (width,) = place.module.normalized_shape
        yield width, f"{width} channels of {place.path}"

    def apply(self, place: Place, group: Group) -> nn.Module:
        """A norm with reduced statistics."""
        return NormAcrossHeads(place.module, group)


class Divided(Entry):
    """Attributes of a module that count heads or channels of a rank, for forwards that read them
    (libraries' do; ours infer them): each is divided by the number of ranks."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __repr__(self) -> str:
        return f"Divided{self.names}"

    def takes(self, module: nn.Module) -> bool:
        """Modules that have those attributes."""
        return all(type(getattr(module, name, None)) is int for name in self.names)

    def counts(self, place: Place) -> Iterator[tuple[int, str]]:
        """The attributes."""
        for name in self.names:
            number = getattr(place.module, name)
            yield number, f"{name}={number} of {place.path}"

    def apply(self, place: Place, group: Group) -> nn.Module:
        """The same module."""
        for name in self.names:
            setattr(place.module, name, getattr(place.module, name) // group.size)
        return place.module


Plan = Mapping[str, Entry]


def plan_of(model_class: type) -> Plan | None:
    """The table of a model's class: its own attribute ``TP_PLAN``, or its file's; or inherited."""
    found = table_of(model_class, TABLE)
    return None if found is None else found[0]


class PlannedModel:
    """A model and its table, met: which module each row means. Changes nothing until `apply`.

    Raises:
        PipelineDefinitionError: a row matches nothing or a module that it cannot be applied to, a
            module is matched by two rows, or weights are tied between modules of which only some
            are matched.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.model = model
        self._name = type(model).__name__
        self._steps: list[tuple[Place, Entry]] = []
        rows: dict[str, str] = {}
        for pattern, entry in plan.items():
            matches = [place for place in self._places() if fnmatchcase(place.path, pattern)]
            if not matches:
                raise self._wrong(pattern, "matches no module")
            for place in matches:
                if place.path in rows:
                    raise self._wrong(pattern, f"and {rows[place.path]!r} match {place.path}")
                if not entry.takes(place.module):
                    kind = type(place.module).__name__
                    raise self._wrong(pattern, f"matches {place.path}, a {kind}: not for {entry}")
                rows[place.path] = pattern
                self._steps.append((place, entry))
        self._check_ties(rows)

    def misfit(self, size: int) -> str:
        """The first thing that does not divide over so many ranks; empty if all do."""
        for place, entry in self._steps:
            for number, what in entry.counts(place):
                if number % size:
                    return what
        return ""

    def apply(self, group: Group) -> None:
        """Put parallel modules in the places of plain ones; each parameter learns its slice.

        Raises:
            ValueError: something does not divide; ask `misfit` before.
        """
        if group.size == 1:
            return
        if wrong := self.misfit(group.size):
            raise ValueError(f"{wrong} does not divide over {group.size} ranks")
        tied: dict[int, nn.Parameter] = {}
        originals = []
        made = [(place, entry.apply(place, group)) for place, entry in self._steps]
        for place, module in made:
            if module is place.module:
                continue
            originals.append(place.module)  # alive until the end: the ids below stay theirs
            for name, old in place.module.named_parameters(recurse=False):
                new = tied.setdefault(id(old), getattr(module, name))
                if shard_of(new) != shard_of(getattr(module, name)):
                    raise self._wrong(place.path, f"ties {name} to a tensor that is cut otherwise")
                setattr(module, name, new)
            setattr(place.parent, place.path.rpartition(".")[2], module)

    def _places(self) -> Iterator[Place]:
        for path, module in self.model.named_modules(remove_duplicate=False):
            if path:
                yield Place(self.model, path, module)

    def _check_ties(self, rows: Mapping[str, str]) -> None:
        """All owners of a parameter that a matched module holds must be matched."""
        owners: dict[int, list[str]] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), []).append(path)
        for paths in owners.values():
            matched = [path for path in paths if path in rows]
            if matched and len(matched) < len(paths):
                left = next(path for path in paths if path not in rows)
                raise self._wrong(rows[matched[0]], f"cuts {matched[0]}, but not {left}, its tie")

    def _wrong(self, pattern: str, problem: str) -> PipelineDefinitionError:
        return PipelineDefinitionError(f"{TABLE} of {self._name}: {pattern!r} {problem}")


def _heads(place: Place, name: str) -> tuple[int, str]:
    number = place.number(name)
    return number, f"{name}={number} of {type(place.model).__name__}"
