"""What the scheduler and the service tell whoever watches them: metrics, traces, logs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from sglang.multimodal_gen.runtime.managers.jobs import JobRecord
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch, Req

Made = Callable[[OutputBatch], object]


class Observer:
    """Hears of jobs and batches; this one does nothing. Called from several threads, and quick."""

    def job(self, record: JobRecord, parts: Sequence[Req], result: Future[Any]) -> None:
        """A job was taken, during its visit if it has one; ``result`` tells how it ends."""

    def batch(self, batch: Req, jobs: Sequence[str]) -> AbstractContextManager[Made]:
        """A context around the run of a batch of some jobs' ids, told of its output in the end."""
        return contextlib.nullcontext(lambda output: None)


class Observers(Observer):
    """Several as one."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    def job(self, record: JobRecord, parts: Sequence[Req], result: Future[Any]) -> None:
        """Tell all."""
        for observer in self.observers:
            observer.job(record, parts, result)

    @contextlib.contextmanager
    def batch(self, batch: Req, jobs: Sequence[str]) -> Iterator[Made]:
        """Tell all."""
        with ExitStack() as stack:
            told = [stack.enter_context(o.batch(batch, jobs)) for o in self.observers]

            def made(output: OutputBatch) -> None:
                for tell in told:
                    tell(output)

            yield made
