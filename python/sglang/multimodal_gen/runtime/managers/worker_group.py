"""A worker of many ranks: the same verbs, carried out by processes that work together."""

from __future__ import annotations

import logging
import queue
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sglang.multimodal_gen.runtime.layers.lora.receipt import LoRAReceipt
from sglang.multimodal_gen.runtime.managers.lora_verbs import LoRAVerbs
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.managers.ranks.orders import (
    Event,
    Finished,
    OrderUnderWay,
)
from sglang.multimodal_gen.runtime.managers.ranks.pixels import sendable, unpacked
from sglang.multimodal_gen.runtime.managers.ranks.replicas import Replicas
from sglang.multimodal_gen.runtime.managers.ranks.start import start_crew
from sglang.multimodal_gen.runtime.managers.ranks.watch import LOADING_SECONDS, Patience
from sglang.multimodal_gen.runtime.pipelines_core.lora_pipeline import LoRAPipeline
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch, Req
from sglang.multimodal_gen.runtime.utils.environ import LaunchedRank
from sglang.multimodal_gen.runtime.utils.errors import (
    CallbackFailed,
    Cancelled,
    CheckpointError,
    InternalError,
    UserError,
    WorkerDied,
)
from sglang.multimodal_gen.runtime.utils.progress import (
    Preview,
    ProgressEvent,
    ProgressListener,
)

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
"""How often a running request looks whether its caller wants it to stop."""

Events = queue.Queue[tuple[OrderUnderWay, Event]]


class WorkerGroup(LoRAVerbs):
    """One loaded model on several ranks, as one worker; with ``dp``, several copies of it.

    Starts the ranks of this machine, meets those of others, and gives them orders. An error that
    all ranks raise is the request's alone, as with one rank. A rank that dies, fails alone or hangs
    ends them all; `restart` starts others.

    ``launched`` is this process's place where torchrun started it and the ranks. ``progress`` hears
    about loading. Verbs may be called from several threads; each replica runs one batch at a time.

    Raises:
        CheckpointError, DiffusionError: as `Worker`.
        WorkerDied: a rank ended before its model was loaded.
    """

    def __init__(
        self,
        model: ModelDescription,
        *,
        progress: ProgressListener | None = None,
        launched: LaunchedRank | None = None,
    ) -> None:
        _refuse_main(model)
        self.model = model
        self.dealt: Counter[int] = Counter()
        """Batches given to each replica."""
        self.lora_receipts: tuple[LoRAReceipt, ...] = ()
        self.notes: tuple[str, ...] = ()
        """One sentence for each choice that rank 0 made while loading."""
        self._launched = launched
        self._adapters: dict[str, Any] | None = None
        """Those loaded and in force (`get_lora_status`), once a verb has changed them."""
        self._open(progress)

    @property
    def is_alive(self) -> bool:
        """Whether all ranks are there, as far as is known now: none has to be asked."""
        return self._crew.failure is None and not self._closed

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the ranks that were started from here, by rank."""
        return self._crew.pids

    def check(self) -> None:
        """Raise `WorkerDied` if the ranks are gone; from any thread, also while a batch runs."""
        self._crew.check()

    def run(self, batch: Req) -> OutputBatch:
        """Run one batch on a replica that is free, or the first that will be.

        Raises:
            DiffusionError: as `Worker.run`; `WorkerDied` if the ranks are gone.
        """
        return next(self.run_all([batch]))

    def run_all(self, batches: Iterable[Req]) -> Iterator[OutputBatch]:
        """Run batches on all replicas at the same time; results come in the order of ``batches``.

        What is still running when an error is raised, or when nobody asks for more, is stopped.
        """
        waiting = deque(enumerate(batches))
        events: Events = queue.Queue()
        running: dict[OrderUnderWay, _Running] = {}
        done: dict[int, OutputBatch] = {}
        index = 0
        try:
            while waiting or running or done:
                self._deal(waiting, running, events)
                self._next_event(running, events, done)
                while index in done:
                    yield done.pop(index)
                    index += 1
        finally:
            for order in running:
                self._crew.cancel(order)

    def on_adapters(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Call a verb on adapters on all ranks, when no batch runs; returns what rank 0 said."""
        with self._replicas.all():
            try:
                return self._adapter_verb(verb, *args, **kwargs)
            finally:
                if verb != "get_lora_status" and self.is_alive and self._takes_adapters:
                    self._adapters = self._adapter_verb("get_lora_status")

    def call(self, function: Callable[..., Any], *args: Any) -> dict[int, Any]:
        """``function(worker, *args)`` on every rank, when no batch runs; what each returned.

        The ranks import ``function``: it is one of a module. All of them run it together, so what
        it asks of the pipeline's groups they ask alike. `restart` forgets what it changed.

        Raises:
            DiffusionError: what it raised on all ranks, or `WorkerDied`.
        """
        with self._replicas.all():
            return self._ask_all(function.__qualname__, "call", (function, args))

    def restart(self, progress: ProgressListener | None = None) -> None:
        """End what is left of the ranks and start others, with the adapters that were in force.

        Raises:
            UserError: there are ranks that this process did not start.
            DiffusionError: as when the group was made.
        """
        if self._launched is not None or self.model.server_args.parallel.nnodes > 1:
            raise UserError(
                "ranks of other machines cannot be started from here: start the commands again"
            )
        self.close()
        self._open(progress)
        if self._adapters is not None:
            with self._replicas.all():
                self._adapters = self._restored(self._adapters)

    def close(self) -> None:
        """End the ranks; nothing of them stays."""
        self._closed = True
        self._crew.close()
        self._abandon.detach()

    # Parts.

    def _open(self, progress: ProgressListener | None) -> None:
        crew = self._crew = start_crew(self.model, self._launched)
        # When nobody holds this any more, and when the interpreter ends.
        self._abandon = weakref.finalize(self, crew.abandon)
        self._closed = False
        layout = self.model.server_args.parallel.layout
        self._replicas = Replicas(layout.replicas, crew.check)
        try:
            order = self._crew.give(
                f"the loading of {self.model.source.name}",
                tuple(range(layout.world_size)),
                "load",
                patience=Patience(LOADING_SECONDS, LOADING_SECONDS),
            )
            self.lora_receipts, self.notes = _loaded(order, progress)
        except BaseException:
            self.close()
            raise

    @property
    def _takes_adapters(self) -> bool:
        return issubclass(self.model.info.pipeline_cls, LoRAPipeline)

    def _adapter_verb(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        return self._ask_all(verb, "on_adapters", ((verb, *args), kwargs))[0]

    def _restored(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Load and put in force on new ranks what old ones had; what is gone is told, and missed.

        A file that has vanished must not keep the model from being served.
        """
        paths = {each["nickname"]: each["path"] for each in wanted["loaded_adapters"]}
        now = self._adapter_verb("get_lora_status")["loaded_adapters"]
        there = {each["nickname"]: each["path"] for each in now}
        for name in there.keys() - paths.keys():
            self._adapter_verb("unload_lora_adapter", name)
        lost = set()
        for name, path in paths.items():
            if there.get(name) == path:
                continue
            try:
                self._adapter_verb("load_lora_adapter", path, name)
            except (UserError, CheckpointError) as error:
                lost.add(name)
                logger.warning("lora %r is lost: %s", name, error)
        self._adapter_verb("unset_lora", "all")
        for component, active in wanted["active"].items():
            kept = [each for each in active if each["nickname"] not in lost]
            if kept:
                self._adapter_verb(
                    "set_lora",
                    [each["nickname"] for each in kept],
                    None,
                    component,
                    [each["strength"] for each in kept],
                    merge_mode="merge" if kept[0]["merged"] else "dynamic",
                )
        return self._adapter_verb("get_lora_status")

    def _ask_all(self, what: str, verb: str, arguments: tuple[Any, ...]) -> dict[int, Any]:
        """Give all ranks one order and wait; what each returned."""
        ranks = tuple(range(self.model.server_args.parallel.layout.world_size))
        order = self._crew.give(what, ranks, verb, arguments)
        event = None
        while not isinstance(event, Finished):
            _, event = order.events.get()
            if isinstance(event, WorkerDied):
                raise WorkerDied(str(event))
        return order.values()

    def _deal(
        self,
        waiting: deque[tuple[int, Req]],
        running: dict[OrderUnderWay, _Running],
        events: Events,
    ) -> None:
        """Give batches to the replicas that are free; wait for one only if we run none."""
        while waiting:
            replica = self._replicas.take(_POLL_SECONDS if not running else 0.0)
            if replica is None:
                return
            index, batch = waiting.popleft()
            self.dealt[replica] += 1
            try:
                order = self._crew.give(
                    f"request {batch.request_id}",
                    self._replicas.ranks[replica],
                    "run",
                    (sendable(batch),),
                    events=events,
                    when_over=lambda replica=replica: self._replicas.free(replica),
                )
            except BaseException:
                self._replicas.free(replica)  # nobody else will
                raise
            running[order] = _Running(index, batch)

    def _next_event(
        self,
        running: dict[OrderUnderWay, _Running],
        events: Events,
        done: dict[int, OutputBatch],
    ) -> None:
        """Wait a moment for something to happen, and pass it on."""
        if not running:
            return
        try:
            order, event = events.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            order, event = None, None
        for other, request in running.items():
            if request.wants_to_stop():
                self._crew.cancel(other)
        if order is None or order not in running:
            return
        request = running[order]
        if isinstance(event, WorkerDied):
            running.clear()
            raise WorkerDied(str(event))
        if isinstance(event, ProgressEvent | Preview):
            if request.report(event):
                self._crew.cancel(order)
            return
        del running[order]
        if request.failure is not None:
            raise request.failure
        values = order.values()
        output = values.pop(order.ranks[0])
        done[request.index] = unpacked(output, [output.peak_memory_mb, *values.values()])


class _Running:
    """A batch that runs on a replica, and its caller's end of it."""

    def __init__(self, index: int, batch: Req) -> None:
        self.index = index
        self.failure: CallbackFailed | None = None
        self._control = batch.control
        self._stopping = False

    def wants_to_stop(self) -> bool:
        """Whether the caller wants it to stop; said once."""
        if self._stopping or not self._control.cancelled.is_set():
            return False
        self._stopping = True
        return True

    def report(self, event: ProgressEvent | Preview) -> bool:
        """Tell the caller; whether that failed, and the batch must stop."""
        if self.failure is not None:
            return False
        try:
            if isinstance(event, Preview):
                self._control.show(event)
            else:
                self._control.report(event.phase, event.done, event.total, event.label)
        except CallbackFailed as error:
            self.failure = error
            self._stopping = True
            return True
        except Cancelled:
            return self.wants_to_stop()
        return False


def _loaded(
    order: OrderUnderWay, progress: ProgressListener | None
) -> tuple[tuple[LoRAReceipt, ...], tuple[str, ...]]:
    """Wait until a model is loaded; returns the receipts of the adapters in force, and notes."""
    while True:
        _, event = order.events.get()
        if isinstance(event, ProgressEvent):
            if progress is not None:
                progress(event)
        elif isinstance(event, WorkerDied):
            # One rank may find a checkpoint's fault before the others are that far.
            error = order.first_error()
            if error is None or isinstance(error, InternalError):
                raise event
            raise error
        else:
            return order.values()[0]


def _refuse_main(model: ModelDescription) -> None:
    """Other processes cannot import what a script defines: they do not run it again."""
    info = model.info
    for cls in (
        info.pipeline_cls,
        info.sampling_param_cls,
        type(model.server_args.pipeline_config),
    ):
        if cls.__module__ == "__main__":
            raise UserError(
                f"{cls.__qualname__} is defined in the script that runs; several ranks need it in "
                "a module of its own, which each of them can import"
            )
