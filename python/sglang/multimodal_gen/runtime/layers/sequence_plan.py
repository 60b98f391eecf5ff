"""How a denoiser's sequences are split over ranks: a table at the end of its file.

::

    SP_PLAN = SequencePlan(
        streams=("text", "image"),
        edges=(
            Split("encoder_hidden_states", "text", dim=1),
            Split("hidden_states", "image", dim=1),
            Split("rotary", ("text", "image"), dim=0),
            Gather(RETURN, "image", dim=1),
        ),
    )
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from sglang.multimodal_gen.runtime.layers.attention.usp import USPAttention
from sglang.multimodal_gen.runtime.layers.model_table import table_of
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

RETURN = "return"
"""In place of an argument's name: what the module returns."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A place where whole sequences become pieces, or pieces become whole.

    Args:
        value: an argument of the module's ``forward``, or `RETURN`. A tensor, or tuples, lists and
            dicts of tensors that are all treated alike; None is left alone.
        streams: what its ``dim`` holds: one stream, or several, end to end.
        dim: the dimension of tokens.
        at: the module, by its name in the denoiser (``blocks.0``; ``*`` in place of a part of the
            name is any); the denoiser itself by default.
        item: of a tuple, only this one.
    """

    value: str
    streams: str | tuple[str, ...]
    dim: int
    at: str = ""
    item: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The streams as a tuple."""
        return (self.streams,) if isinstance(self.streams, str) else tuple(self.streams)

    def __str__(self) -> str:
        where = f", at={self.at!r}" if self.at else ""
        return f"{type(self).__name__}({self.value!r}, {self.streams!r}, dim={self.dim}{where})"


@dataclass(frozen=True, slots=True)
class Split(Edge):
    """Each rank goes on with its piece of each stream, zeros added where it does not divide.

    A key mask is split like the tokens it speaks of. A value that holds one stream tells its
    length; one that holds several needs them known, by an edge above it, but for one at most.
    """


@dataclass(frozen=True, slots=True)
class Gather(Edge):
    """Each rank goes on with the whole streams, what `Split` added taken off."""


@dataclass(frozen=True)
class SequencePlan:
    """Sequence parallelism of one denoiser, as data.

    Args:
        streams: names of the sequences, in the order in which the model joins them.
        edges: where they are split and gathered. Edges of one call are met in this order.
        attention: name of a module (patterns as in `Edge.at`) -> the streams that are keys of the
            attention in it. What is not named attends to all streams, joined.
        heads: the constructor's argument that counts attention heads, so that a count that does
            not divide is refused before weights are read.
    """

    streams: tuple[str, ...]
    edges: tuple[Split | Gather, ...]
    attention: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    heads: str = "num_attention_heads"

    def __post_init__(self) -> None:
        if len(set(self.streams)) < len(self.streams):
            raise PipelineDefinitionError(f"SP_PLAN.streams {self.streams}: a name comes twice")
        for line, names in self._lines():
            for name in names:
                if name not in self.streams:
                    raise PipelineDefinitionError(
                        f"SP_PLAN: {line} names stream {name!r}.{did_you_mean(name, self.streams)} "
                        f"The streams are: {', '.join(self.streams)}"
                    )
        for kind in (Split, Gather):
            if not any(isinstance(edge, kind) for edge in self.edges):
                raise PipelineDefinitionError(
                    f"SP_PLAN has no {kind.__name__}: a sequence that is split must be gathered"
                )

    def _lines(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        for edge in self.edges:
            yield str(edge), edge.names
        for at, names in self.attention.items():
            yield f"attention[{at!r}]", names

    def places(self, denoiser: nn.Module) -> list[Place]:
        """The edges, found in a model.

        Raises:
            PipelineDefinitionError: a line names no module, or no argument of its ``forward``.
        """
        places: list[Place] = []
        modules = dict(denoiser.named_modules())
        for edge in self.edges:
            for name in _matching(edge.at, modules, str(edge)):
                places.append(Place(edge, modules[name], _position(edge, name, modules[name])))
        return places

    def attention_layers(self, denoiser: nn.Module) -> dict[str, tuple[str, ...]]:
        """Each `USPAttention` whose keys are split -> their streams.

        Raises:
            PipelineDefinitionError: a line names no attention, or the model has none.
        """
        modules = dict(denoiser.named_modules())
        layers = [
            name
            for name, module in modules.items()
            if isinstance(module, USPAttention) and not module.replicated_keys
        ]
        if not layers:
            raise PipelineDefinitionError(
                f"{type(denoiser).__name__} has an SP_PLAN, but no USPAttention that could take "
                "part in it"
            )
        chosen: dict[str, tuple[str, ...]] = {}
        for at, streams in self.attention.items():
            line = f"attention[{at!r}]"
            places = _matching(at, modules, line)
            inside = [n for n in layers if any(f"{n}.".startswith(f"{p}.") for p in places)]
            if not inside:
                raise PipelineDefinitionError(f"SP_PLAN: {line} holds no USPAttention")
            for name in inside:
                if name in chosen:
                    raise PipelineDefinitionError(f"SP_PLAN: {line} and another name {name}")
                chosen[name] = tuple(streams)
        return {name: chosen.get(name, self.streams) for name in layers}


@dataclass(frozen=True, eq=False)
class Place:
    """An edge at one module; ``position`` is that of the argument, None for what it returns."""

    edge: Split | Gather
    module: nn.Module
    position: int | None


def sequence_plan(model_class: type) -> SequencePlan | None:
    """The plan of a model's class: its own attribute ``SP_PLAN``, or its file's; or inherited.

    Raises:
        PipelineDefinitionError: it is something else.
    """
    found = table_of(model_class, "SP_PLAN")
    if found is None or found[0] is None:
        return None
    plan, cls = found
    if not isinstance(plan, SequencePlan):
        raise PipelineDefinitionError(
            f"SP_PLAN of {cls.__module__}.{cls.__name__} must be a SequencePlan, not "
            f"{type(plan).__name__}"
        )
    return plan


def _matching(at: str, modules: Mapping[str, nn.Module], line: str) -> list[str]:
    """Names of modules; a ``*`` does not reach over a dot."""
    wanted = at.split(".")
    found = [
        name
        for name in modules
        if len(parts := name.split(".")) == len(wanted)
        and all(map(fnmatch.fnmatchcase, parts, wanted))
    ]
    if not found:
        raise PipelineDefinitionError(
            f"SP_PLAN: {line} names no module of the model.{did_you_mean(at, modules)}"
        )
    return found


def _position(edge: Edge, name: str, module: nn.Module) -> int | None:
    if edge.value == RETURN:
        return None
    arguments = list(inspect.signature(module.forward).parameters)
    if edge.value not in arguments:
        raise PipelineDefinitionError(
            f"SP_PLAN: {edge}: {type(module).__name__}.forward{f' of {name}' if name else ''} has "
            f"no argument {edge.value!r}.{did_you_mean(edge.value, arguments)} It has: "
            f"{', '.join(arguments)}"
        )
    return arguments.index(edge.value)
