"""The service behind a server's doors: one model, its scheduler, and a record for each job.

A door (HTTP routes, one day others) turns what a client sent into a `WorkOrder`; everything from
admission on is here, the same for every kind of work.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.managers.client_error import PATH_SETTINGS
from sglang.multimodal_gen.runtime.managers.file_store import FileStore
from sglang.multimodal_gen.runtime.managers.followed_record import FollowedRecord
from sglang.multimodal_gen.runtime.managers.job_progress import (
    FinishedJob,
    JobPlaces,
    JobProgress,
    Keep,
)
from sglang.multimodal_gen.runtime.managers.jobs import JobRecord, JobStore
from sglang.multimodal_gen.runtime.managers.keeping import (
    UNTIL_FINISHED,
    KeepingLine,
    ResultKeeper,
    check_keep_format,
    require_files,
)
from sglang.multimodal_gen.runtime.managers.kept_inputs import (
    FilesToDrop,
    fetched_inputs,
    files_of,
    input_ids,
    keep_inputs,
)
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.managers.observer import Observer
from sglang.multimodal_gen.runtime.managers.runner import AdapterHost, Checkable
from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler
from sglang.multimodal_gen.runtime.managers.storage.checkpoints import CheckpointStore
from sglang.multimodal_gen.runtime.managers.visit import charge
from sglang.multimodal_gen.runtime.managers.waiting_line import MAX_PRIORITY
from sglang.multimodal_gen.runtime.managers.work_order import WorkOrder, order_of, rerun_of
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.utils.errors import (
    DiffusionError,
    InvalidRequest,
    StoreUnavailable,
    Unavailable,
    UserError,
)
from sglang.multimodal_gen.runtime.utils.progress import Preview
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean


@dataclass(eq=False, slots=True)
class Job:
    """A job under way. ``result`` ends with a `FinishedJob` or with the `DiffusionError`.

    ``record`` is as it was when the job was put in line, or found.
    """

    id: str
    result: Future[FinishedJob]
    cancel: Callable[[], bool]
    record: JobRecord


class GenerationService:
    """Takes work orders for one loaded model. Safe to call from any thread.

    ``served_name`` is what clients call the model.
    """

    def __init__(
        self,
        model: ModelDescription,
        scheduler: Scheduler,
        jobs: JobStore,
        *,
        served_name: str,
        job_ttl: float = 3600.0,
        default_timeout: float | None = None,
        notes: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
        files: FileStore | None = None,
        file_ttl: float = 3600.0,
        checkpoints: CheckpointStore | None = None,
        owner: str | None = None,
        lease_seconds: float = 15.0,
    ) -> None:
        self.model = model
        self.scheduler = scheduler
        self.jobs = jobs
        self.served_name = served_name
        self.job_ttl = job_ttl
        self.default_timeout = default_timeout
        self.notes = tuple(notes)
        self.clock = clock
        self.files = files
        self.keeper = (
            None
            if files is None
            else ResultKeeper(files, model=served_name, file_ttl=file_ttl, clock=clock)
        )
        """Stores the outputs of orders that want it; None where no files are kept."""
        self.keeping = KeepingLine()
        self.leftovers = FilesToDrop(files)
        self.checkpoints = checkpoints
        self.owner = uuid.uuid4().hex if owner is None else owner
        self.lease_seconds = lease_seconds
        self.places = JobPlaces(jobs, self.owner, clock, job_ttl, checkpoints, self._forget)
        self._live: dict[str, JobProgress] = {}
        self._followed: dict[str, FollowedRecord] = {}
        self._lock = threading.Lock()
        self.observer = Observer()
        self.adapters: dict[str, Any] = self._adapter_status()

    def observe(self, observer: Observer) -> None:
        """Tell ``observer`` of each job and batch from now on."""
        self.observer = self.scheduler.observer = observer

    @property
    def live(self) -> dict[str, JobProgress]:
        """The jobs that this server is at, by id."""
        with self._lock:
            return dict(self._live)

    def submit(
        self, order: WorkOrder, *, on_preview: Callable[[Preview], None] | None = None
    ) -> Job:
        """Check an order, and put it in line; or find the job that came before under its key.

        ``on_preview`` is called from the thread that runs batches, and must not block. This may
        write to a disk: it is not for an event loop.

        Raises:
            InvalidRequest: a setting is unknown or does not fit the model.
            UserError: the outputs are to be kept, which cannot be done here.
            KeyReused: the order's key came before with another request.
            OutputError: an input cannot be stored.
            QueueFull, RateLimited, Unavailable: not now.
        """
        known = None if order.key is None else self.jobs.find(order.key, self.clock())
        if known is not None:
            return self.attach(known)  # it was admitted and paid for
        parts = self.admitted(order)
        book = charge(parts)
        job_id = uuid.uuid4().hex
        now = self.clock()
        timeout = self.default_timeout if order.timeout is None else order.timeout
        seeds = [seed for part in parts for seed in part.seeds]
        record = JobRecord(
            id=job_id,
            kind=order.kind,
            model=self.served_name,
            created_at=now,
            priority=order.priority,
            settings={k: v for k, v in order.settings.items() if k not in PATH_SETTINGS},
            rerun=rerun_of(order, seeds) if order.durable else None,
            inputs=self._keep_inputs(order, now),
            deadline=None if timeout is None else now + timeout,
            owner=self.owner,
            lease_until=now + self.lease_seconds,
            attempts=1,
            webhook=order.webhook,
            warnings=(*order.warnings, *parts[0].warnings),
        )
        watcher = self._watch(record, order, parts, on_preview)
        with self._lock:
            self._live[job_id] = watcher
        try:
            known = self.jobs.add(record, order.key)  # before it can finish
            if known.id != job_id:
                self._withdraw(record, None)
                return self.attach(known)
            self.scheduler.submit(job_id, parts, watcher, priority=order.priority, timeout=timeout)
        except DiffusionError as error:
            self._withdraw(record, error)
            raise
        book()
        self.observer.job(record, parts, watcher.result)
        result = watcher.result
        return Job(job_id, result, lambda: not result.done() and self.cancel(job_id), record)

    def admitted(self, order: WorkOrder) -> list[Req]:
        """The batches of an order; raises as `submit`."""
        params = self.model.sampling_params(order.settings)
        self._check_adapters(params)
        if not -MAX_PRIORITY <= order.priority <= MAX_PRIORITY:
            problem = f"must lie in -{MAX_PRIORITY}..{MAX_PRIORITY}"
            raise InvalidRequest("priority", order.priority, problem)
        parts = self.model.admit(params, data_type=order.data_type, previews=order.previews)
        if order.keep is not None:
            require_files(self.keeper)
            check_keep_format(order.keep, parts[0].data_type, parts[0].fps)
        return parts

    def resume(self, record: JobRecord) -> None:
        """Go on with a job that was claimed for this server after an interruption.

        Raises:
            DiffusionError: it cannot be run here.
        """
        assert record.rerun is not None
        with fetched_inputs(self.files, record.inputs) as (paths, folder):
            order = order_of(record, paths)
            parts = self.admitted(order)
            watcher = self._watch(record, order, parts, None, folder)
            watcher.came_at = self.clock()
            first = watcher.take_up(record.results, parts)
            if first < len(parts) and self.checkpoints is not None:
                parts[first].resume_from = self.checkpoints.load(record.id, first)
            with self._lock:
                self._live[record.id] = watcher
            if first == len(parts):
                self.observer.job(record, parts, watcher.result)
                watcher.ended(None)
                return
            now = watcher.came_at
            try:
                self.scheduler.submit(
                    record.id,
                    parts,
                    watcher,
                    priority=record.priority,
                    timeout=None if record.deadline is None else record.deadline - now,
                    waited=max(0.0, now - record.created_at),
                    first_part=first,
                )
            except BaseException:
                self._forget(record.id)
                raise
        self.observer.job(record, parts, watcher.result)

    def attach(self, record: JobRecord) -> Job:
        """A job that is known already: one of this server, of another, or one that has ended."""
        watcher = self.live.get(record.id)
        if watcher is not None:
            return Job(record.id, watcher.result, lambda: False, record)
        return Job(record.id, self._follow(record), lambda: False, record)

    def _follow(self, record: JobRecord) -> Future[FinishedJob]:
        """The end of another server's job; all who wait for it share one look at it."""
        with self._lock:
            known = self._followed.get(record.id)
            if known is not None and not known.result.done():
                return known.result
            followed = self._followed[record.id] = FollowedRecord(self.jobs, record)
        followed.result.add_done_callback(lambda _: self._follow_no_more(record.id, followed))
        return followed.result

    def _follow_no_more(self, job_id: str, followed: FollowedRecord) -> None:
        with self._lock:
            if self._followed.get(job_id) is followed:
                del self._followed[job_id]

    def cancel(self, job_id: str) -> bool:
        """Stop a job, waiting, running or being stored; one of another server is stopped by that
        one, soon. False where there is nothing to stop.
        """
        if self.scheduler.cancel(job_id) or self.keeping.cancel(job_id):
            return True
        if job_id in self.live:
            return False  # it has just ended
        record = self.jobs.update(job_id, cancel_requested=True)
        return record is not None

    def delete(self, job_id: str) -> bool:
        """Stop a job if it is not done, and forget it and its files; whether there was one."""
        self.cancel(job_id)
        record = self.jobs.get(job_id)
        if record is None or not self.jobs.delete(job_id):
            return False
        self.leftovers.drop(files_of(record))
        return True

    def sweep(self, now: float) -> None:
        """End what is overdue, and forget what has expired, records and files together."""
        self.scheduler.sweep()
        for record in self.jobs.sweep(now):
            self.leftovers.drop(files_of(record))
        self.leftovers.again(self.jobs)
        if self.files is not None:
            self.files.sweep(now)

    def _watch(
        self,
        record: JobRecord,
        order: WorkOrder,
        parts: Sequence[Req],
        on_preview: Callable[[Preview], None] | None,
        folder: Path | None = None,
    ) -> JobProgress:
        for part in parts:
            part.request_id = record.id
        keep = None
        if order.keep is not None:
            keeper = require_files(self.keeper)
            keep = Keep(order.keep, order.keep_quality, keeper, self.keeping)
        watcher = JobProgress(
            record, parts[0].request, self.places, len(parts), on_preview, keep, folder
        )
        watcher.warnings += order.warnings
        watcher.result.set_running_or_notify_cancel()  # a waiter that gives up must not cancel it
        return watcher

    def _keep_inputs(self, order: WorkOrder, now: float) -> dict[str, list[str]]:
        if not order.durable or not PATH_SETTINGS & order.settings.keys():
            return {}
        files = require_files(self.keeper).files
        return keep_inputs(files, order.settings, now + UNTIL_FINISHED)

    def _withdraw(self, record: JobRecord, error: DiffusionError | None) -> None:
        """Forget a job that never was; who found it by its key meanwhile gets the same ``error``.

        Where it cannot be forgotten now, it waits for a server that has room: its key is taken.
        """
        watcher = self.live[record.id]
        try:
            self.jobs.delete(record.id)
            self.leftovers.drop(input_ids(record))
        except StoreUnavailable:
            self.leftovers.drop_unless_kept(record.id, input_ids(record))
            free = {"owner": None, "lease_until": None}
            self.jobs.update_later(record.id, only_if_owner=self.owner, **free)
        self._forget(record.id)  # after the record: until then, who finds that finds this
        if error is not None:
            watcher.result.set_exception(error)

    def _forget(self, job_id: str) -> None:
        with self._lock:
            self._live.pop(job_id, None)

    def check(self) -> None:
        """Ask the runner whether it answers. May take as long as it takes.

        Raises:
            DiffusionError: something is gone.
        """
        problem = self.scheduler.status.problem
        if problem is not None:
            raise Unavailable(problem)
        if isinstance(self.scheduler.runner, Checkable):
            self.scheduler.runner.check()

    # Adapters: changed between two batches, by the thread that runs them.

    def load_adapter(self, name: str, path: str) -> Future[Any]:
        """Load a LoRA file under a name; the answer tells what it holds."""
        host = self._adapter_host()

        def load() -> dict[str, Any]:
            receipt = host.load_lora(name, path)
            self.adapters = host.lora_status()
            return receipt

        return self.scheduler.call(load)

    def unload_adapter(self, name: str) -> Future[Any]:
        """Forget an adapter; requests that wait for it will fail."""
        host = self._adapter_host()

        def unload() -> None:
            host.unload_lora(name)
            self.adapters = host.lora_status()

        return self.scheduler.call(unload)

    @property
    def adapter_names(self) -> list[str]:
        """The adapters that a request may name."""
        return [adapter["nickname"] for adapter in self.adapters["loaded_adapters"]]

    def _adapter_host(self) -> AdapterHost:
        host = self.scheduler.runner
        if not isinstance(host, AdapterHost):
            raise UserError("what runs the model here takes no LoRA adapters")
        return host

    def _adapter_status(self) -> dict[str, Any]:
        runner = self.scheduler.runner
        if isinstance(runner, AdapterHost):
            return runner.lora_status()
        return {"loaded_adapters": [], "active": {}}

    def _check_adapters(self, params: SamplingParams) -> None:
        """Clients name adapters that the server has; they never say where a file is."""
        names = self.adapter_names
        for choice in params.lora_choices or ():
            if choice.is_path:
                problem = "name an adapter that the server has loaded; paths are not taken"
                raise InvalidRequest("lora", choice.adapter, problem)
            if choice.adapter not in names:
                loaded = f"Loaded: {', '.join(names)}." if names else "None is loaded."
                problem = f"no adapter of that name.{did_you_mean(choice.adapter, names)} {loaded}"
                raise InvalidRequest("lora", choice.adapter, problem)
