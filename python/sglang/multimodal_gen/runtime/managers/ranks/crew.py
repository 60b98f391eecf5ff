"""The ranks of a run as the front sees them: orders out, ends in, and no loss unnoticed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.multimodal_gen.runtime.managers.ranks.channel import Channel
from sglang.multimodal_gen.runtime.managers.ranks.messages import (
    Beat,
    CancelOrder,
    End,
    LogLine,
    Order,
    Progress,
    RankLeft,
    Stop,
)
from sglang.multimodal_gen.runtime.managers.ranks.orders import (
    Event,
    Finished,
    OrderUnderWay,
)
from sglang.multimodal_gen.runtime.managers.ranks.spawn import RankProcess, end_all
from sglang.multimodal_gen.runtime.managers.ranks.watch import (
    ALONE_SECONDS,
    Patience,
    Verdict,
    Watch,
)
from sglang.multimodal_gen.runtime.managers.ranks.wire import DoesNotTravel, pack
from sglang.multimodal_gen.runtime.utils.errors import WorkerDied

_TICK_SECONDS = 0.25
_LAST_WORDS_SECONDS = 1.0
_FAREWELL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Lost:
    """The line to a rank, or to another node's command, has ended."""


class Crew:
    """Ranks that were started, each with a line of its own. Safe to use from several threads.

    A thread reads each line, and one looks after them all: it notices a rank that dies, that fails
    alone or that hangs, between orders too. Any of these ends all ranks, for good.

    Args:
        channels: the line to each rank.
        processes: the ranks that this process started, to be ended with it.
        nodes: the lines to other nodes' commands, by node.
        store: where the ranks met, and look things up at any time; lives as long as this.
        rank_here: the thread that is a rank of this process.
    """

    def __init__(
        self,
        channels: dict[int, Channel],
        processes: dict[int, RankProcess],
        nodes: dict[int, Channel] | None = None,
        *,
        store: object = None,
        rank_here: threading.Thread | None = None,
    ) -> None:
        self.failure: WorkerDied | None = None
        self._channels = channels
        self._processes = processes
        self._nodes = nodes or {}
        self._store = store
        self._rank_here = rank_here
        self._orders: dict[int, OrderUnderWay] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._closing = False
        self._inbox: queue.Queue[tuple[str, int, Any]] = queue.Queue()
        for rank, channel in channels.items():
            self._start(self._read, "rank", rank, channel)
        for node, channel in self._nodes.items():
            self._start(self._read, "node", node, channel)
        self._start(self._look_after)

    # Orders.

    def give(
        self,
        what: str,
        ranks: tuple[int, ...],
        verb: str,
        arguments: tuple[Any, ...] = (),
        *,
        events: queue.Queue[tuple[OrderUnderWay, Event]] | None = None,
        when_over: Callable[[], object] | None = None,
        patience: Patience | None = None,
    ) -> OrderUnderWay:
        """Give an order to some ranks; its events end with `Finished` or with why it cannot.

        ``what`` names it in messages: "rank 1 died during ...".

        Raises:
            DoesNotTravel: the arguments cannot be sent.
            WorkerDied: the ranks are gone.
        """
        body = pack(arguments)
        order = OrderUnderWay(
            next(self._numbers),
            what,
            ranks,
            queue.Queue() if events is None else events,
            Watch(time.monotonic(), patience or Patience()),
            when_over,
        )
        with self._lock:
            self.check()
            self._orders[order.id] = order
        for rank in ranks:
            # A rank that is gone is noticed by whoever reads its line.
            with contextlib.suppress(OSError):
                self._channels[rank].send(Order(order.id, verb, body))
        return order

    def cancel(self, order: OrderUnderWay) -> None:
        """Ask an order to stop; its end says whether it did."""
        with contextlib.suppress(OSError):
            self._channels[order.ranks[0]].send(CancelOrder(order.id))

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the ranks that this process started."""
        return {rank: process.process.pid for rank, process in self._processes.items()}

    def check(self) -> None:
        """Raise `WorkerDied` if the ranks are gone."""
        if self.failure is not None:
            raise WorkerDied(str(self.failure))
        if self._closing:
            raise WorkerDied("the ranks were told to stop")

    def fail(self, error: WorkerDied) -> None:
        """End all ranks; every order under way ends with ``error``, and so does each later one."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self.failure = error
            orders, self._orders = list(self._orders.values()), {}
        # Killed before anyone hears of it: who does may start others at once.
        self._end(Stop(str(error)), patience=0.0)
        for order in orders:
            order.events.put((order, error))

    def close(self) -> None:
        """End the ranks: gently where nothing runs, at once otherwise."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            idle = not self._orders
        self._end(Stop(), patience=_FAREWELL_SECONDS if idle else 0.0)
        self._await_rank_here()

    def abandon(self) -> None:
        """End the ranks that this process started, without a word; for the interpreter's end."""
        self._closing = True
        end_all(list(self._processes.values()), 0.0)
        self._await_rank_here()

    def _await_rank_here(self) -> None:
        if self._rank_here is not None:
            # Free once the others are gone; if it hangs itself, only this process's end helps.
            self._rank_here.join(_FAREWELL_SECONDS)

    def _end(self, stop: Stop, patience: float) -> None:
        for channel in (*self._channels.values(), *self._nodes.values()):
            with contextlib.suppress(OSError):
                channel.send(stop)
        end_all(list(self._processes.values()), patience)

    # Looking after them.

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=target, args=args, name="crew", daemon=True).start()

    def _read(self, kind: str, number: int, channel: Channel) -> None:
        while True:
            try:
                self._inbox.put((kind, number, channel.receive()))
            except DoesNotTravel as error:
                said = f"sent what cannot be read here ({error})"
                self._inbox.put((kind, number, RankLeft(number, said, "")))
            except (EOFError, OSError):
                channel.close()  # by the one thread that reads it: its number may be another's soon
                self._inbox.put((kind, number, _Lost()))
                return

    def _look_after(self) -> None:
        while not self._closing:
            try:
                kind, number, message = self._inbox.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                pass
            else:
                self._hear(kind, number, message)
                if not self._inbox.empty():
                    continue
            for order in list(self._orders.values()):
                self._suspect(order)

    def _hear(self, kind: str, number: int, message: object) -> None:
        order = self._orders.get(getattr(message, "order", 0))
        if isinstance(message, _Lost):
            self._lost(kind, number)
        elif isinstance(message, LogLine):
            _log(message)
        elif isinstance(message, RankLeft):
            self.fail(self._left(message.rank, message.how, message.output))
        elif order is None:
            return  # the last words of an order that is over
        elif isinstance(message, Beat):
            order.watch.hear(number, message, time.monotonic())
        elif isinstance(message, Progress):
            order.events.put((order, message.event))
        elif isinstance(message, End) and order.end(number, message):
            self._finish(order)

    def _finish(self, order: OrderUnderWay) -> None:
        if order.is_split:
            self.fail(order.split())
            return
        with self._lock:
            self._orders.pop(order.id, None)
        if order.when_over is not None:
            order.when_over()
        order.events.put((order, Finished()))

    def _lost(self, kind: str, number: int) -> None:
        if kind == "node":
            said = f"node {number} ended, or cannot be reached. All ranks were ended."
            self.fail(WorkerDied(said))
            return
        process = self._processes.get(number)
        if process is None:
            # Its own node knows how it ended, and says so at about the same time.
            how, words = self._told_by_its_node(number)
        else:
            how, words = process.ended(_LAST_WORDS_SECONDS), process.last_words()
        self.fail(self._left(number, how, words))

    def _told_by_its_node(self, rank: int) -> tuple[str, str]:
        deadline = time.monotonic() + (_LAST_WORDS_SECONDS if self._nodes else 0.0)
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                kind, number, message = self._inbox.get(timeout=left)
                if isinstance(message, RankLeft) and message.rank == rank:
                    return message.how, message.output
                if isinstance(message, _Lost) and kind == "node":
                    self._lost(kind, number)  # its rank went with it, and was heard of first
                    break
        return "ended, or cannot be reached", ""

    def _left(self, rank: int, how: str, words: str) -> WorkerDied:
        doing = [order.what for order in self._orders.values() if rank in order.ranks]
        during = f" during {doing[0]}" if doing else ""
        said = f"rank {rank} {how}{during}. All ranks were ended."
        return WorkerDied("\n".join(part for part in (said, words) if part))

    def _suspect(self, order: OrderUnderWay) -> None:
        now = time.monotonic()
        if order.failed_since is not None and now - order.failed_since > ALONE_SECONDS:
            self.fail(order.split())
            return
        verdict = order.watch.verdict(order.working, list(order.ends), now)
        if verdict is not None:
            self.fail(self._hung(order, verdict))

    def _hung(self, order: OrderUnderWay, verdict: Verdict) -> WorkerDied:
        stacks = dict(order.watch.stacks(verdict.ranks))
        mute = [
            self._processes[r] for r in verdict.ranks if r in self._processes if r not in stacks
        ]
        for process in mute:
            process.ask_for_stack()
        if mute:
            time.sleep(_LAST_WORDS_SECONDS / 2)
        for process in mute:
            stacks[process.task.rank] = process.last_words() or "(it does not answer)"
        names = " and ".join(f"rank {rank}" for rank in verdict.ranks)
        told = [f"rank {rank} was here:\n{text.rstrip()}" for rank, text in stacks.items()]
        said = f"{names} {verdict.problem}, during {order.what}. All ranks were ended."
        return WorkerDied("\n".join([said, *told]))


def _log(line: LogLine) -> None:
    """Give a rank's record to this process's handlers."""
    logger = logging.getLogger(line.name)
    if logger.isEnabledFor(line.level):
        logger.handle(
            logger.makeRecord(line.name, line.level, line.path, line.line, line.text, (), None)
        )
