"""Progress in a terminal: bars where someone watches, a few plain lines where a log is written."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from sglang.multimodal_gen.runtime.utils.progress import ProgressEvent

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SECONDS_BETWEEN_LINES = 5.0
"""How often a log hears about one piece of work that goes on."""

_Key = tuple[str, str]  # phase and label


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
    """One bar for each piece of work: a component that loads, a stage that steps."""

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
        self._tasks: dict[_Key, TaskID] = {}
        self._progress.start()

    def show(self, event: ProgressEvent) -> None:
        key = (event.phase, event.label)
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(_title(event), amount="")
        self._progress.update(
            self._tasks[key],
            completed=event.done if event.total else 1,
            total=event.total or 1,
            amount=_amount(event),
        )

    def close(self) -> None:
        self._progress.stop()


class _Lines:
    """A line when a piece of work ends, and now and then while it lasts."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._started: dict[_Key, float] = {}
        self._written: dict[_Key, float] = {}

    def show(self, event: ProgressEvent) -> None:
        key, now = (event.phase, event.label), self._clock()
        start = self._started.setdefault(key, now)
        finished = event.done >= event.total
        if not finished and now - self._written.get(key, start) < SECONDS_BETWEEN_LINES:
            return
        self._written[key] = now
        line = f"{_title(event)}: {_amount(event)}, {now - start:.1f} s"
        print(line, file=self._stream, flush=True)
        if finished:  # the same work may come again, for the next batch
            del self._started[key], self._written[key]

    def close(self) -> None:
        """Nothing to take down: each line is complete when it is written."""


def _title(event: ProgressEvent) -> str:
    return f"load {event.label}" if event.phase == "load" else event.label


def _amount(event: ProgressEvent) -> str:
    """Bytes while loading, otherwise pieces of work."""
    if event.total == 0:
        return "done"
    if event.phase != "load":
        return f"{event.done}/{event.total}"
    unit, size = ("GB", 1e9) if event.total >= 1e9 else ("MB", 1e6)
    return f"{event.done / size:.1f}/{event.total / size:.1f} {unit}"
