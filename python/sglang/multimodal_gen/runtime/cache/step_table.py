"""What a step's forward computes from its conditioning alone, made for several steps at once.

A modulation (shift, scale, gate of every block) is the product of one row an image with a weight:
it takes as long as the weight takes to read. FLUX.1's are 3.2 of its 12 billion weights, read once
a step for a row. All times of a request are known before its loop, so the rows of up to
`FEW_ROWS` steps and images are made with one reading, and each step is handed its own.

A denoiser that can be handed them says so with a table at the end of its file::

    STEP_TABLE = StepTable(argument="modulation", method="modulation_rows")
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.model_table import table_of
from sglang.multimodal_gen.runtime.layers.ops.fp8_rows import FEW_ROWS
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError

TABLE = "STEP_TABLE"
_FEWEST_STEPS = 2

Kwargs = Mapping[str, Any]
Prepare = Callable[[Tensor], Kwargs]
"""The time of each image [B] -> the arguments of the denoiser's forward at that time."""


@dataclass(frozen=True, slots=True)
class StepTable:
    """Where a denoiser's forward takes rows that were made before, and what makes them.

    Args:
        argument: of ``forward``, None where the rows are to be made in it; else [B, width].
        method: of the denoiser. Its parameters are arguments of ``forward`` that have images first
            (None allowed); it returns [images, width], each row of its own image's values alone;
            or None where this checkpoint's forward takes none.
    """

    argument: str
    method: str


@dataclass(slots=True)
class TableCounters:
    """Times that rows were made, the rows, and the calls that were handed some: the proof that the
    mechanism ran."""

    made: int = 0
    rows: int = 0
    handed: int = 0


@dataclass(frozen=True, slots=True)
class _Window:
    """Rows of the steps from ``first`` on, [steps, B, width]."""

    first: int
    rows: Tensor

    def __contains__(self, step: int) -> bool:
        return self.first <= step < self.first + len(self.rows)


class StepTableCalls:
    """The tables of one batch: made when its loop begins, gone when it ends.

    Branches of guidance and experts have their own. Windows of steps begin at fixed steps, so that
    a loop that is taken up in its middle computes the same bits. Memory: `FEW_ROWS` rows for each
    (FLUX.1: 34 MB in 16 bits).

    Args:
        timesteps: of all steps of the loop, on the device.
        images: of the batch.
        counters: are told.
    """

    def __init__(self, timesteps: Tensor, images: int, counters: TableCounters) -> None:
        self.timesteps = timesteps
        self.images = images
        self.counters = counters
        self._span = FEW_ROWS // images
        self._windows: dict[tuple[nn.Module, int], _Window] = {}
        self._tables: dict[nn.Module, StepTable | None] = {}

    def at(self, step: int) -> StepRows:
        """What one step is handed."""
        return StepRows(self, step)

    def given(
        self, step: int, denoiser: nn.Module, branch: int, kwargs: Kwargs, prepare: Prepare
    ) -> Kwargs:
        """The arguments of a forward at ``step``, with the step's rows where it takes any."""
        table = self._table(denoiser)
        if table is None:
            return kwargs
        window = self._windows.get((denoiser, branch))
        if window is None or step not in window:
            made = self._made(step, denoiser, table, kwargs, prepare)
            if made is None:
                self._tables[denoiser] = None
                return kwargs
            window = self._windows[denoiser, branch] = made
        self.counters.handed += 1
        return {**kwargs, table.argument: window.rows[step - window.first]}

    def _table(self, denoiser: nn.Module) -> StepTable | None:
        if denoiser not in self._tables:
            table = step_table(type(denoiser))
            here = table is not None and _weights_are_here(denoiser, self.timesteps.device)
            self._tables[denoiser] = table if here else None
        return self._tables[denoiser]

    def _made(
        self, step: int, denoiser: nn.Module, table: StepTable, kwargs: Kwargs, prepare: Prepare
    ) -> _Window | None:
        method = getattr(denoiser, table.method)
        wanted = inspect.signature(method).parameters.values()
        if any(p.default is p.empty and p.name not in kwargs for p in wanted):
            return None  # forward will say what is missing
        first = step // self._span * self._span
        times = self.timesteps[first : first + self._span]
        each = [prepare(t.expand(self.images)) for t in times]
        arguments = {p.name: _joined([one.get(p.name) for one in each]) for p in wanted}
        rows = method(**arguments)
        if rows is None:
            return None
        self.counters.made += 1
        self.counters.rows += len(rows)
        return _Window(first, rows.unflatten(0, (len(times), self.images)))


class StepRows(NamedTuple):
    """The tables of a batch, at one step of its loop."""

    tables: StepTableCalls
    step: int

    def given(self, denoiser: nn.Module, branch: int, kwargs: Kwargs, prepare: Prepare) -> Kwargs:
        """See `StepTableCalls.given`."""
        return self.tables.given(self.step, denoiser, branch, kwargs, prepare)


def begin_tables(timesteps: Tensor, images: int, counters: TableCounters) -> StepTableCalls | None:
    """For a batch whose loop begins; None where its images leave room for one step at a time."""
    if FEW_ROWS // images < _FEWEST_STEPS:
        return None
    return StepTableCalls(timesteps, images, counters)


def step_table(model_class: type) -> StepTable | None:
    """The table of a denoiser's class: its attribute ``STEP_TABLE``, or its file's; or inherited.

    Raises:
        PipelineDefinitionError: it is something else, or names what the class does not have.
    """
    found = table_of(model_class, TABLE)
    if found is None or found[0] is None:
        return None
    table, cls = found
    owner = f"{TABLE} of {cls.__module__}.{cls.__name__}"
    if not isinstance(table, StepTable):
        problem = f"{owner} must be a StepTable, not {type(table).__name__}"
        raise PipelineDefinitionError(problem)
    method = getattr(model_class, table.method, None)
    if method is None:
        raise PipelineDefinitionError(f"{owner}: the class has no method {table.method!r}")
    known = inspect.signature(model_class.forward).parameters
    asked = [name for name in inspect.signature(method).parameters if name != "self"]
    for name in (table.argument, *asked):
        if name not in known:
            raise PipelineDefinitionError(f"{owner}: forward has no argument {name!r}")
    return table


def _weights_are_here(denoiser: nn.Module, device: torch.device) -> bool:
    """Whether all weights are on the loop's device, whole: not streamed, not spread over ranks,
    where they come with the block that uses them, and so do their products."""
    return all(
        type(parameter) is nn.Parameter and parameter.device == device
        for parameter in denoiser.parameters()
    )


def _joined(values: list[Any]) -> Tensor | None:
    return None if values[0] is None else torch.cat(values)
