"""What a rank does: it takes orders one by one, and reports the end of each."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.distributed.process_group import join_ranks
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.managers.ranks.agreement import Agreement, SharedControl
from sglang.multimodal_gen.runtime.managers.ranks.channel import Channel
from sglang.multimodal_gen.runtime.managers.ranks.heartbeat import Heartbeat
from sglang.multimodal_gen.runtime.managers.ranks.messages import (
    CancelOrder,
    End,
    Order,
    Progress,
    RankTask,
    SentError,
    Stop,
)
from sglang.multimodal_gen.runtime.managers.ranks.pixels import packed
from sglang.multimodal_gen.runtime.managers.ranks.wire import DoesNotTravel, unpack
from sglang.multimodal_gen.runtime.managers.worker import Worker
from sglang.multimodal_gen.runtime.models.external_packages import load_external_packages
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req


class RankLoop:
    """Follows the front's orders on the thread that calls `run`, until it says stop.

    Args:
        task: which rank this is, and of what.
        channel: the line to the front.
        gone: called, on another thread, when the front says stop while an order runs, or is gone
            without having said so (None). `run` will not return by itself.
        store: where the ranks meet, if the task does not say.
    """

    def __init__(
        self,
        task: RankTask,
        channel: Channel,
        gone: Callable[[Stop | None], object],
        store: dist.Store | None = None,
    ) -> None:
        self._task = task
        self._channel = channel
        self._gone = gone
        self._store = store
        self._busy = False
        self._last_ended = -1
        self._orders: queue.Queue[Order | Stop] = queue.Queue()
        self._cancelled: dict[int, threading.Event] = {}
        self._lock = threading.Lock()
        self._agreement: Agreement | None = None
        self._worker: Worker | None = None
        self._parallel: ParallelState | None = None

    def run(self) -> Stop:
        """Work until the front says stop; returns what it said."""
        heart = Heartbeat(self._channel.send)
        threading.Thread(target=self._listen, name="orders", daemon=True).start()
        while True:
            order = self._orders.get()
            if isinstance(order, Stop):
                if self._worker is not None:
                    self._worker.close()  # before the ranks' groups end
                return order
            self._busy = True
            with heart.during(order.id):
                end = self._end_of(order)
            try:
                self._channel.send(end)
            except DoesNotTravel as error:  # what a called function returned
                sent = SentError.of(error)
                self._channel.send(End(order.id, error=sent, reports=end.reports))
            self._busy = False

    def _listen(self) -> None:
        """Takes the front's words as they come, also while an order runs."""
        while True:
            try:
                message = self._channel.receive()
            except (EOFError, OSError):
                self._gone(None)
                return
            if isinstance(message, CancelOrder):
                if message.id > self._last_ended:  # else it comes too late, and would be kept
                    self._wish_to_stop(message.id).set()
                continue
            if isinstance(message, Stop) and self._busy:
                self._gone(message)
            self._orders.put(message)
            if isinstance(message, Stop):
                return

    def _wish_to_stop(self, order: int) -> threading.Event:
        """The flag of an order; whoever comes first makes it."""
        with self._lock:
            return self._cancelled.setdefault(order, threading.Event())

    def _end_of(self, order: Order) -> End:
        self._agreement = None
        try:
            value = self._do(order)
        except Exception as error:  # noqa: BLE001 - the boundary: the front is told, and decides
            return End(order.id, error=SentError.of(error), reports=self._reports())
        finally:
            with self._lock:
                self._last_ended = order.id
                self._cancelled.pop(order.id, None)
        return End(order.id, value, reports=self._reports())

    def _reports(self) -> int:
        return 0 if self._agreement is None else self._agreement.reports

    def _do(self, order: Order) -> Any:
        if order.verb == "load":
            worker = self._worker = self._load(order.id)
            return (worker.lora_receipts, worker.notes) if self._task.rank == 0 else None
        assert self._worker is not None, f"{order.verb} before load"
        arguments = unpack(order.arguments, self._task.packages)
        if order.verb == "run":
            return self._run(order.id, *arguments)
        if order.verb == "call":
            function, given = arguments
            return function(self._worker, *given)
        assert order.verb == "on_adapters", order.verb
        args, kwargs = arguments
        value = self._worker.on_adapters(*args, **kwargs)
        return value if self._task.rank == 0 else None

    def _load(self, order: int) -> Worker:
        task = self._task
        load_external_packages()
        model: ModelDescription = unpack(task.model, task.packages)
        device = torch.device("cuda", task.local_rank) if task.device == "cuda" else "cpu"
        store = self._store
        if store is None:
            assert task.store is not None
            store = task.store.connect(task.rank, task.layout.world_size)
        self._parallel = join_ranks(task.layout, task.rank, torch.device(device), store)
        speaks = task.rank == 0
        return Worker(
            model,
            progress=(lambda event: self._channel.send(Progress(order, event))) if speaks else None,
            parallel=self._parallel,
        )

    def _run(self, order: int, batch: Req) -> Any:
        assert self._parallel is not None
        assert self._worker is not None
        is_lead = self._parallel.replica.is_first
        self._agreement = Agreement(self._parallel.control)
        tell = (lambda event: self._channel.send(Progress(order, event))) if is_lead else None
        batch.control = SharedControl(  # the batch is this process's own copy
            listener=tell,
            cancelled=self._wish_to_stop(order),
            preview_listener=tell,
            agreement=self._agreement,
        )
        output = self._worker.run(batch)
        return packed(output) if is_lead else output.peak_memory_mb
