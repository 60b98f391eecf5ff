"""What follows from the stages' declarations: a checked chain, wire formats, lifetimes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import (
    READABLE_FROM_START,
    REQ_FIELDS,
    WRITTEN_BY_STAGES,
    Req,
)
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

Stages = Mapping[str, PipelineStage]
Components = Mapping[str, Any]

_FREEABLE = WRITTEN_BY_STAGES - {"output"}


def link(stages: Stages) -> None:
    """Check a chain once, when the pipeline is built.

    Raises:
        PipelineDefinitionError: a stage reads a field that nobody before it writes.
    """
    written = set(READABLE_FROM_START)
    for name, stage in stages.items():
        if stage.reads is None or stage.writes is None:
            written |= REQ_FIELDS
            continue
        missing = stage.reads - written
        if missing:
            raise PipelineDefinitionError(
                f"{name} ({type(stage).__name__}) reads {sorted(missing)}, which no earlier stage "
                f"writes; the chain is: {' -> '.join(stages)}"
            )
        written |= stage.writes


def crossing(stages: Stages, cut: int) -> frozenset[str]:
    """Fields that must travel when the chain is cut before stage number ``cut``.

    Raises:
        PipelineDefinitionError: a stage declares nothing, so what it needs is unknown.
    """
    before: set[str] = set(READABLE_FROM_START)
    after: set[str] = set()
    for index, (name, stage) in enumerate(stages.items()):
        if stage.reads is None or stage.writes is None:
            raise PipelineDefinitionError(f"{name} must declare `reads` and `writes` to be cut")
        if index < cut:
            before |= stage.writes
        else:
            after |= stage.reads
    return frozenset(before & after)


def last_use(stages: Stages) -> dict[str, frozenset[str]]:
    """For each stage, the stage-written fields that nobody touches after it.

    Empty where any stage declares nothing. The output is never among them.
    """
    if any(stage.reads is None or stage.writes is None for stage in stages.values()):
        return {}
    last = {
        field: name
        for name, stage in stages.items()
        for field in (stage.reads or frozenset()) | (stage.writes or frozenset())
    }
    return {
        name: frozenset(f for f, owner in last.items() if owner == name) & _FREEABLE
        for name in stages
    }


def component_uses(stage: PipelineStage, components: Components) -> tuple[str, ...]:
    """The components that a stage uses, by its declaration, else by what it holds.

    Raises:
        PipelineDefinitionError: it declares an attribute that it does not have or that holds
            something else, or it holds a component without declaring it.
    """
    names = _names_of_parts(components)
    held = {
        attribute: [names[id(part)] for part in _parts(value) if id(part) in names]
        for attribute, value in vars(stage).items()
    }
    owner = type(stage).__name__
    if stage.uses is None:
        return tuple(dict.fromkeys(name for found in held.values() for name in found))
    for attribute in stage.uses:
        if attribute not in held:
            raise PipelineDefinitionError(
                f"{owner}.uses names {attribute!r}, which the stage does not have."
                f"{did_you_mean(attribute, held)}"
            )
        strangers = [part for part in _parts(vars(stage)[attribute])
                     if isinstance(part, nn.Module) and id(part) not in names]  # fmt: skip
        if strangers:
            raise PipelineDefinitionError(
                f"{owner}.{attribute} holds a {type(strangers[0]).__name__}, which is no component "
                f"of the pipeline. It has: {', '.join(components)}"
            )
    for attribute, found in held.items():
        if found and attribute not in stage.uses:
            raise PipelineDefinitionError(
                f"{owner} holds the component {found[0]!r} in {attribute!r}, but its `uses` is "
                f"{stage.uses}: add {attribute!r}, or its weights may be elsewhere when it runs"
            )
    return tuple(dict.fromkeys(name for attribute in stage.uses for name in held[attribute]))


def _names_of_parts(components: Components) -> dict[int, str]:
    """Every module of every component, by identity: a stage may hold only a decoder."""
    names: dict[int, str] = {}
    for name, component in components.items():
        if isinstance(component, nn.Module):
            for part in component.modules():
                names.setdefault(id(part), name)
    return names


def _parts(value: object) -> list[Any]:
    """What an attribute holds: itself, or the members of a list or a mapping."""
    if isinstance(value, nn.ModuleList | nn.ModuleDict):
        return [value]
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else [value]


class Guarded:
    """A view of a `Req` through which a stage may touch only what it declared.

    Used under ``--check-stages`` and in tests; in production a stage gets the `Req` itself.
    """

    __slots__ = ("_batch", "_stage")

    def __init__(self, batch: Req, stage: PipelineStage) -> None:
        object.__setattr__(self, "_batch", batch)
        object.__setattr__(self, "_stage", stage)

    def __getattr__(self, name: str) -> Any:
        stage = self._stage
        allowed = (stage.reads or frozenset()) | (stage.writes or frozenset()) | _ALWAYS
        if name in REQ_FIELDS and name not in allowed:
            raise PipelineDefinitionError(
                f"{type(stage).__name__} (or a hook it calls) reads batch.{name}, which it does "
                "not declare"
            )
        return getattr(self._batch, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in (self._stage.writes or frozenset()):
            raise PipelineDefinitionError(
                f"{type(self._stage).__name__} writes batch.{name} without declaring it"
            )
        setattr(self._batch, name, value)


_ALWAYS = frozenset({"control", "request", "request_id", "warnings", "timings", "seeds"})
"""Open to every stage: whose request it is, and where to report."""
