"""The scheduler: takes requests, decides what runs next, and sees each through to its end.

Logic only: the clock and the runner are handed in, and whoever calls `Scheduler.run_next` in a loop
(`dispatcher`) lends the thread. Other methods may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from sglang.multimodal_gen.runtime.managers.batch_merging import join, part_of
from sglang.multimodal_gen.runtime.managers.checkpoint_rule import CheckpointRule
from sglang.multimodal_gen.runtime.managers.cost_model import CostModel
from sglang.multimodal_gen.runtime.managers.observer import Observer
from sglang.multimodal_gen.runtime.managers.runner import Restartable, Runner
from sglang.multimodal_gen.runtime.managers.running_batch import (
    BatchCheckpoints,
    Member,
    RunningBatch,
)
from sglang.multimodal_gen.runtime.managers.waiting_line import Ticket, WaitingLine, Watcher
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import (
    OutputBatch,
    Req,
    RequestControl,
)
from sglang.multimodal_gen.runtime.utils.errors import (
    Cancelled,
    DeadlineExceeded,
    DiffusionError,
    InternalError,
    QueueFull,
    Unavailable,
    WorkerDied,
)
from sglang.multimodal_gen.runtime.utils.progress import Preview, ProgressEvent

logger = logging.getLogger(__name__)

_MAX_RETRY_AFTER = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingLimits:
    """How much may wait, and how much runs together."""

    max_waiting: int = 128
    max_batch: int = 4
    batching_delay: float = 0.0
    """Seconds that a batch with room waits for company."""
    together: bool = True
    """Whether requests may share a batch."""
    checkpoints: CheckpointRule = CheckpointRule()
    """When the states of running batches are handed to those who keep them."""


@dataclass(frozen=True, slots=True)
class SchedulerStatus:
    """What is going on. ``problem`` is why nothing can run, where that is so."""

    waiting: int
    running: int
    batches: int
    problem: str | None
    busy_for: float | None
    """Seconds since the running batch was last heard of; None when idle."""


class Scheduler:
    """Runs the requests' batches on ``runner``, by the rule of `waiting_line`.

    A batch that is at work is not interrupted for another. A batch of several requests that fails
    is run again request by request, so that each fails or succeeds by itself.
    """

    def __init__(
        self,
        runner: Runner,
        limits: SchedulingLimits | None = None,
        *,
        costs: CostModel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.observer = Observer()
        self.runner = runner
        self.limits = SchedulingLimits() if limits is None else limits
        self.costs = CostModel() if costs is None else costs
        self.clock = clock
        self._changed = threading.Condition()
        self._line = WaitingLine(self.costs)
        self._alone: deque[tuple[Ticket, int]] = deque()
        self._tickets: dict[str, Ticket] = {}
        self._running: RunningBatch | None = None
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closed: str | None = None
        self._problem: str | None = None
        self._number = 0
        self._batches = 0

    # For doors.

    def submit(
        self,
        ticket_id: str,
        parts: Sequence[Req],
        watcher: Watcher,
        *,
        priority: int = 0,
        timeout: float | None = None,
        waited: float = 0.0,
        first_part: int = 0,
    ) -> None:
        """Take a request, whose admitted ``parts`` have no control of their own in force.

        ``timeout`` is the seconds from now after which it ends with `DeadlineExceeded`. One that
        comes back after an interruption has ``waited`` seconds already, and those of its parts
        before ``first_part`` are made.

        Raises:
            QueueFull: as many wait as may.
            Unavailable: the server stops, or has nothing to run it on.
        """
        with self._changed:
            if self._closed or self._problem:
                raise Unavailable(self._closed or f"nothing can run now: {self._problem}")
            if len(self._line) >= self.limits.max_waiting:
                raise QueueFull(
                    f"{len(self._line)} requests wait already, which is all that may",
                    retry_after=self._retry_after(),
                )
            now = self.clock()
            self._number += 1
            ticket = Ticket(
                id=ticket_id,
                number=self._number,
                parts=list(parts),
                watcher=watcher,
                arrived=now - waited,
                position=first_part,
                priority=priority,
                deadline=None if timeout is None else now + timeout,
            )
            self._tickets[ticket.id] = ticket
            self._line.add(ticket)
            self._changed.notify_all()

    def has(self, ticket_id: str) -> bool:
        """Whether a request is here: waiting, or at work."""
        with self._changed:
            return ticket_id in self._tickets

    def cancel(self, ticket_id: str, error: DiffusionError | None = None) -> bool:
        """End a request, waiting or running; False if there is none of that id any more.

        Its caller is told at once. A batch that it shares goes on for the others; one of its own
        stops within a step.
        """
        with self._changed:
            ticket = self._tickets.get(ticket_id)
        if ticket is None:
            return False
        return self._end(ticket, error or Cancelled("cancelled"))

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Have something done to the runner between two batches, in its thread."""
        future: Future[Any] = Future()
        with self._changed:
            if self._closed or self._problem:
                raise Unavailable(self._closed or f"nothing can run now: {self._problem}")
            self._calls.append((function, future))
            self._changed.notify_all()
        return future

    def sweep(self) -> None:
        """End the requests whose time is over; to be called now and then, and at each step."""
        with self._changed:
            now = self.clock()
            late = [
                t for t in self._tickets.values() if t.deadline is not None and t.deadline <= now
            ]
        for ticket in late:
            assert ticket.deadline is not None
            self._end(
                ticket,
                DeadlineExceeded(
                    "the request's own time limit passed "
                    + ("while it ran" if ticket.started else "before it began")
                ),
            )

    @property
    def status(self) -> SchedulerStatus:
        """What is going on now."""
        with self._changed:
            running = self._running
            return SchedulerStatus(
                waiting=len(self._line) + len(self._alone),
                running=0 if running is None else len(running.live),
                batches=self._batches,
                problem=self._problem,
                busy_for=None if running is None else self.clock() - running.heard,
            )

    @property
    def takes_work(self) -> bool:
        """Whether `submit` is open, room in the line aside."""
        with self._changed:
            return self._closed is None and self._problem is None

    # Stopping.

    def close(self, why: str) -> None:
        """Take nothing more; what is here goes on."""
        with self._changed:
            self._closed = why
            self._changed.notify_all()

    def hand_back(self) -> None:
        """End what has not begun; its callers are told to ask again."""
        with self._changed:
            waiting = [t for t in self._tickets.values() if not t.started]
            calls, self._calls = list(self._calls), deque()
        error = Unavailable(self._closed or "the server takes no more work")
        for ticket in waiting:
            self._end(ticket, error)
        for _, future in calls:
            future.set_exception(error)

    def abandon(self) -> None:
        """End all that is left, at work or not."""
        with self._changed:
            left = list(self._tickets.values())
        for ticket in left:
            self._end(ticket, Unavailable(self._closed or "the server takes no more work"))

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        with self._changed:
            return not self._tickets and self._running is None

    def wait_until_idle(self, timeout: float) -> bool:
        """Wait for the last request to end; whether it did in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._tickets and self._running is None, timeout
            )

    # For the thread that runs batches.

    def wait_for_work(self, timeout: float) -> None:
        """Wait until `run_next` may find something to do, at most ``timeout`` seconds."""
        with self._changed:
            if self._alone or self._calls:
                return
            delay = self._delay_left()
            self._changed.wait(timeout if delay is None else min(timeout, delay))

    def run_next(self) -> bool:
        """Do one thing: a call, or a batch; False if there is nothing to do yet."""
        self.sweep()
        with self._changed:
            call = self._calls.popleft() if self._calls else None
            running = None if call else self._take()
        if call is not None:
            _answer(*call)
            return True
        if running is None:
            return False
        for member in running.members:
            if not member.ticket.started:
                member.ticket.started = True
                member.ticket.watcher.started()
        self._run(running)
        return True

    def _run(self, running: RunningBatch) -> None:
        start = self.clock()
        try:
            jobs = [member.ticket.id for member in running.members]
            with self.observer.batch(running.batch, jobs) as made:
                output = self.runner.run(running.batch)
                made(output)
        except DiffusionError as error:
            self._failed(running, error)
        except Exception as error:  # the boundary around a runner: its bug is one batch's failure
            logger.exception("the runner failed")
            self._failed(running, InternalError(f"{type(error).__name__} in the runner: {error}"))
        else:
            self.costs.learn(running.batch, self.clock() - start)
            self._finished(running, output)
        finally:
            with self._changed:
                self._running = None
                self._changed.notify_all()

    def _take(self) -> RunningBatch | None:
        """The next batch, out of the line and at work; None while there is none."""
        if self._alone:
            chosen = [self._alone.popleft()]
        elif len(self._line) == 0 or self._delay_left():
            return None
        else:
            tickets = self._line.next_batch(self.limits.max_batch, together=self.limits.together)
            chosen = [(ticket, ticket.position) for ticket in tickets]
            for ticket in tickets:
                ticket.position += 1
                ticket.served_seconds += self.costs.seconds(ticket.parts[ticket.position - 1])
                if ticket.position == len(ticket.parts):
                    self._line.remove(ticket)
        parts = [ticket.parts[part] for ticket, part in chosen]
        states = BatchCheckpoints(self.limits.checkpoints, self.clock)
        control = RequestControl(self._heard, preview_listener=self._previewed, checkpoints=states)
        batch, rows = join(parts, control)
        members = [Member(t, part, r) for (t, part), r in zip(chosen, rows, strict=True)]
        states.members = members
        self._running = RunningBatch(batch, members, self.clock())
        self._batches += 1
        return self._running

    def _delay_left(self) -> float | None:
        """Seconds that the next batch should still wait for company; None when nothing waits."""
        if len(self._line) == 0:
            return None
        if not self.limits.batching_delay or not self.limits.together:
            return 0.0
        tickets = self._line.next_batch(self.limits.max_batch, together=True)
        images = sum(ticket.parts[ticket.position].batch_size for ticket in tickets)
        if images >= self.limits.max_batch:
            return 0.0
        return max(0.0, tickets[0].arrived + self.limits.batching_delay - self.clock())

    # What the running batch tells.

    def _heard(self, event: ProgressEvent) -> None:
        self.sweep()
        if self._running is not None:
            self._running.tell_progress(event, self.clock())

    def _previewed(self, preview: Preview) -> None:
        if self._running is not None:
            self._running.tell_preview(preview)

    def _finished(self, running: RunningBatch, output: OutputBatch) -> None:
        for member in running.live:
            ticket = member.ticket
            try:
                ticket.watcher.made(part_of(output, ticket.parts[member.part], member.rows))
            except Exception as error:  # the boundary around a watcher: as around a runner
                logger.exception("the output of request %s was not taken", ticket.id)
                problem = f"{type(error).__name__} when the output was passed on: {error}"
                self._end(ticket, InternalError(problem))
                continue
            if member.part == len(ticket.parts) - 1:
                self._end(ticket, None)

    def _failed(self, running: RunningBatch, error: DiffusionError) -> None:
        if isinstance(error, WorkerDied):
            self._recover(error)
        live = running.live
        if self._problem is None and live and len(running.members) > 1:
            logger.warning("a batch of %d requests failed; each runs alone", len(live))
            with self._changed:
                self._alone.extend((member.ticket, member.part) for member in live)
            return
        for member in live:
            self._end(member.ticket, error)

    def _recover(self, error: WorkerDied) -> None:
        """Bring the runner back; where that cannot be, nothing that waits has a chance."""
        logger.error("%s", error)
        self._problem = str(error)
        if isinstance(self.runner, Restartable):
            try:
                self.runner.restart()
            except DiffusionError as failure:
                logger.error("the runner did not come back: %s", failure)  # noqa: TRY400
                self._problem = f"{error}; it did not come back: {failure}"
            else:
                self._problem = None
                return
        with self._changed:
            live = self._running.live if self._running else []
            busy = {member.ticket.id for member in live}
            waiting = [t for t in self._tickets.values() if t.id not in busy]
        for ticket in waiting:
            self._end(ticket, Unavailable(f"nothing can run now: {self._problem}"))

    def _end(self, ticket: Ticket, error: DiffusionError | None) -> bool:
        """End a request once; a batch in which nobody is left is stopped."""
        with self._changed:
            if ticket.ended:
                return False
            ticket.ended = True
            self._tickets.pop(ticket.id, None)
            self._line.remove(ticket)
            self._alone = deque(entry for entry in self._alone if entry[0] is not ticket)
            running = self._running
            if error is not None and running and not running.live:
                running.batch.control.cancelled.set()
            self._changed.notify_all()
        ticket.watcher.ended(error)
        return True

    def _retry_after(self) -> float:
        running = 0.0 if self._running is None else self.costs.seconds(self._running.batch)
        return min(max(1.0, self._line.seconds() + running), _MAX_RETRY_AFTER)


def _answer(function: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(function())
    except Exception as error:  # noqa: BLE001 - it is raised again where the answer is read
        future.set_exception(error)
