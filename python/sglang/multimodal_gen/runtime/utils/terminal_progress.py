"""Progress in a terminal: bars where someone watches, a few plain lines where a log is written."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from sglang.multimodal_gen.runtime.utils.progress import Phase, ProgressEvent

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SECONDS_BETWEEN_LINES = 5.0
"""How often a log hears about a phase that goes on."""


class _Display(Protocol):
    def show(self, event: ProgressEvent) -> None: ...
    def close(self) -> None: ...


class TerminalProgress:
    """A progress listener that shows what it hears on a terminal or writes it to a log.

    Use it as a context manager: the bars are taken down at the end, also after an error.
    ``stream`` is standard error unless given; bars are drawn only where it is a terminal.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._display: _Display | None = None

    def __call__(self, event: ProgressEvent) -> None:
        """Show one event."""
        if self._display is None:
            watched = self._stream.isatty()
            self._display = _Bars(self._stream) if watched else _Lines(self._stream)
        self._display.show(event)

    def close(self) -> None:
        """Take the bars down; the next event starts new ones."""
        if self._display is not None:
            self._display.close()
            self._display = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Bars:
    """One bar for each phase, which names the component or stage at work."""

    def __init__(self, stream: TextIO) -> None:
        # rich takes 50 ms to import, and only someone who watches pays them.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress: Progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[amount]}", markup=False),
            TimeElapsedColumn(),
            console=Console(file=stream),
            redirect_stdout=False,  # standard output carries the result
        )
        self._tasks: dict[Phase, TaskID] = {}
        self._progress.start()

    def show(self, event: ProgressEvent) -> None:
        if event.phase not in self._tasks:
            self._tasks[event.phase] = self._progress.add_task(_title(event), amount="")
        self._progress.update(
            self._tasks[event.phase],
            description=_title(event),
            completed=event.done if event.total else 1,
            total=event.total or 1,
            amount=_amount(event),
        )

    def close(self) -> None:
        self._progress.stop()


class _Lines:
    """A line when a phase ends, and now and then while it lasts."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._started: dict[Phase, float] = {}
        self._written: dict[Phase, float] = {}

    def show(self, event: ProgressEvent) -> None:
        phase, now = event.phase, self._clock()
        start = self._started.setdefault(phase, now)
        finished = event.done >= event.total
        if not finished and now - self._written.get(phase, start) < SECONDS_BETWEEN_LINES:
            return
        self._written[phase] = now
        line = f"{_title(event)}: {_amount(event)}, {now - start:.1f} s"
        print(line, file=self._stream, flush=True)
        if finished:  # the same phase may come again, for another call
            del self._started[phase], self._written[phase]

    def close(self) -> None:
        """Nothing to take down: each line is complete when it is written."""


def _title(event: ProgressEvent) -> str:
    """What is at work. Loading counts all components together, so its end names none."""
    if event.phase != "load":
        return event.label
    return "load" if event.done >= event.total else f"load {event.label}"


def _amount(event: ProgressEvent) -> str:
    """Bytes while loading, otherwise pieces of work."""
    if event.total == 0:
        return "done"
    if event.phase != "load":
        return f"{event.done}/{event.total}"
    unit, size = ("GB", 1e9) if event.total >= 1e9 else ("MB", 1e6)
    return f"{event.done / size:.1f}/{event.total / size:.1f} {unit}"
