"""What follows from the stages' declarations: a checked chain, wire formats, lifetimes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import (
    READABLE_FROM_START,
    REQ_FIELDS,
    WRITTEN_BY_STAGES,
    Req,
)
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError

Stages = Mapping[str, PipelineStage]

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
