"""The service behind a server's doors: one model, its scheduler, and a record for each job.

A door (HTTP routes, one day others) turns what a client sent into a `WorkOrder`; everything from
admission on is here, the same for every kind of work.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.task_type import DataType
from sglang.multimodal_gen.runtime.managers.client_error import PATH_SETTINGS, client_error
from sglang.multimodal_gen.runtime.managers.file_store import FileStore
from sglang.multimodal_gen.runtime.managers.finished import (
    Finished,
    FinishedImage,
    FinishedVideo,
    finished_of,
    settings_of,
)
from sglang.multimodal_gen.runtime.managers.jobs import JobRecord, JobStore
from sglang.multimodal_gen.runtime.managers.keeping import (
    KeepingLine,
    ResultKeeper,
    check_keep_format,
    require_files,
)
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.managers.runner import AdapterHost, Checkable
from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler
from sglang.multimodal_gen.runtime.managers.waiting_line import MAX_PRIORITY
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch
from sglang.multimodal_gen.runtime.utils.errors import (
    Cancelled,
    DiffusionError,
    InternalError,
    InvalidRequest,
    Unavailable,
    UserError,
)
from sglang.multimodal_gen.runtime.utils.progress import Preview
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkOrder:
    """What a client asks for: sampling settings by name, and how they are to be served.

    ``keep`` is the format (``mp4``, ``png``, ...) in which outputs are stored before the job's
    record says completed; None hands them to whoever waits for the job.
    """

    kind: str
    settings: Mapping[str, Any]
    data_type: DataType
    priority: int = 0
    timeout: float | None = None
    previews: int = 0
    keep: str | None = None
    warnings: Sequence[str] = ()
    """What the door has to say about it already."""


@dataclass(frozen=True, slots=True, eq=False)
class FinishedJob:
    """What a job made, and what it took. ``queue_seconds`` is the wait for its first batch.

    Of outputs that were kept, ``results`` say where they are, and ``images`` and ``videos`` are
    empty.
    """

    id: str
    images: Sequence[FinishedImage]
    videos: Sequence[FinishedVideo]
    results: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    warnings: Sequence[str]
    queue_seconds: float
    run_seconds: float
    timings: Mapping[str, float]
    peak_memory_mb: float


@dataclass(eq=False, slots=True)
class Job:
    """A job under way. ``result`` ends with a `FinishedJob` or with the `DiffusionError`."""

    id: str
    result: Future[FinishedJob]
    cancel: Callable[[], bool]


@dataclass(frozen=True, eq=False, slots=True)
class _Keep:
    """How a job's outputs are kept."""

    format: str
    keeper: ResultKeeper
    line: KeepingLine


@dataclass(eq=False, slots=True)
class _Progress:
    """Keeps a job's record true while the scheduler works on it (a `waiting_line.Watcher`)."""

    record: JobRecord
    params: SamplingParams
    store: JobStore
    keep_seconds: float
    clock: Callable[[], float]
    on_preview: Callable[[Preview], None] | None
    keep: _Keep | None = None
    result: Future[FinishedJob] = field(default_factory=Future)
    outputs: list[Finished] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    peak_memory_mb: float = 0.0
    started_at: float | None = None
    percent: int = 0
    ending: threading.Lock = field(default_factory=threading.Lock)

    def started(self) -> None:
        self.started_at = self.clock()
        self.store.update(self.record.id, status="in_progress", started_at=self.started_at)

    def progressed(self, fraction: float) -> None:
        percent = min(99, int(100 * fraction))
        if percent > self.percent:
            self.percent = percent
            self.store.update(self.record.id, progress=percent)

    def previewed(self, preview: Preview) -> None:
        if self.on_preview is not None:
            self.on_preview(preview)

    def made(self, output: OutputBatch) -> None:
        self.outputs += finished_of(output)
        self.warnings += [text for text in output.warnings if text not in self.warnings]
        for stage, seconds in output.timings.items():
            self.timings[stage] = self.timings.get(stage, 0.0) + seconds
        self.peak_memory_mb = max(self.peak_memory_mb, output.peak_memory_mb)

    def ended(self, error: DiffusionError | None) -> None:
        if error is None and self.keep is not None:
            cancelled = Cancelled("cancelled while its result was stored")
            self.keep.line.run(self.record.id, self._store, lambda: self._finish(cancelled))
        else:
            self._finish(error)

    def _store(self) -> None:
        """Encode and store the outputs, and then call the job completed."""
        keep, outputs = self.keep, self.outputs
        assert keep is not None
        self.outputs = []
        try:
            results = keep.keeper.keep(outputs, keep.format, self._client_settings())
        except DiffusionError as error:
            self._finish(error)
        except BaseException as error:
            self._finish(InternalError(f"{type(error).__name__} while storing: {error}"))
            raise
        else:
            if not self._finish(None, results):
                keep.keeper.discard(results)  # cancelled or deleted in the meantime

    def _finish(
        self, error: DiffusionError | None, kept: Sequence[Mapping[str, Any]] | None = None
    ) -> bool:
        """Write the record's end, and tell who waits; whether it was there to be ended."""
        now = self.clock()
        keep_seconds = self.keep_seconds
        if self.keep is not None:  # a record outlives its files: clients can be told that they went
            keep_seconds = max(keep_seconds, self.keep.keeper.file_ttl)
        final: dict[str, Any] = {
            "completed_at": now,
            "expires_at": now + keep_seconds,
            "warnings": tuple(self.warnings),
        }
        if error is None:
            if kept is None:
                kept = tuple({"seed": output.seed} for output in self.outputs)
            final |= {"status": "completed", "progress": 100, "results": kept}
        elif isinstance(error, Cancelled):
            final |= {"status": "cancelled"}
        else:
            final |= {"status": "failed", "error": client_error(error).as_object()}
        with self.ending:
            if self.result.done():
                return False
            written = self.store.update(self.record.id, **final) is not None
            if self.keep is not None and not written:
                error = error or Cancelled("deleted while its result was stored")
            if error is not None:
                self.result.set_exception(error)
            else:
                self.result.set_result(self._finished(now, kept or ()))
            return written

    def _client_settings(self) -> dict[str, Any]:
        return {k: v for k, v in settings_of(self.params).items() if k not in PATH_SETTINGS}

    def _finished(self, now: float, results: Sequence[Mapping[str, Any]]) -> FinishedJob:
        began = now if self.started_at is None else self.started_at
        return FinishedJob(
            id=self.record.id,
            images=tuple(o for o in self.outputs if isinstance(o, FinishedImage)),
            videos=tuple(o for o in self.outputs if isinstance(o, FinishedVideo)),
            results=results,
            settings=self._client_settings(),
            warnings=tuple(self.warnings),
            queue_seconds=began - self.record.created_at,
            run_seconds=now - began,
            timings=self.timings,
            peak_memory_mb=self.peak_memory_mb,
        )


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
    ) -> None:
        self.model = model
        self.scheduler = scheduler
        self.jobs = jobs
        self.served_name = served_name
        self.job_ttl = job_ttl
        self.default_timeout = default_timeout
        self.notes = tuple(notes)
        self.clock = clock
        self.keeper = (
            None
            if files is None
            else ResultKeeper(files, model=served_name, file_ttl=file_ttl, clock=clock)
        )
        """Stores the outputs of orders that want it; None where no files are kept."""
        self.keeping = KeepingLine()
        self.adapters: dict[str, Any] = self._adapter_status()

    def submit(
        self, order: WorkOrder, *, on_preview: Callable[[Preview], None] | None = None
    ) -> Job:
        """Check an order, and put it in line.

        ``on_preview`` is called from the thread that runs batches, and must not block.

        Raises:
            InvalidRequest: a setting is unknown or does not fit the model.
            UserError: the outputs are to be kept, which cannot be done here.
            QueueFull, Unavailable: not now.
        """
        params = self.model.sampling_params(order.settings)
        self._check_adapters(params)
        if not -MAX_PRIORITY <= order.priority <= MAX_PRIORITY:
            problem = f"must lie in -{MAX_PRIORITY}..{MAX_PRIORITY}"
            raise InvalidRequest("priority", order.priority, problem)
        parts = self.model.admit(params, data_type=order.data_type, previews=order.previews)
        keep = None
        if order.keep is not None:
            check_keep_format(order.keep, parts[0].data_type, parts[0].fps)
            keep = _Keep(order.keep, require_files(self.keeper), self.keeping)
        job_id = uuid.uuid4().hex
        for part in parts:
            part.request_id = job_id
        record = JobRecord(
            id=job_id,
            kind=order.kind,
            model=self.served_name,
            created_at=self.clock(),
            priority=order.priority,
            settings={k: v for k, v in order.settings.items() if k not in PATH_SETTINGS},
        )
        watcher = _Progress(
            record, parts[0].request, self.jobs, self.job_ttl, self.clock, on_preview, keep
        )
        watcher.warnings += order.warnings
        watcher.result.set_running_or_notify_cancel()  # a waiter that gives up must not cancel it
        self.jobs.add(record)  # before it can finish
        timeout = self.default_timeout if order.timeout is None else order.timeout
        try:
            self.scheduler.submit(job_id, parts, watcher, priority=order.priority, timeout=timeout)
        except DiffusionError:
            self.jobs.delete(job_id)
            raise
        return Job(job_id, watcher.result, lambda: self.cancel(job_id))

    def cancel(self, job_id: str) -> bool:
        """Stop a job, waiting, running or being stored; False where there is nothing to stop."""
        return self.scheduler.cancel(job_id) or self.keeping.cancel(job_id)

    def delete(self, job_id: str) -> bool:
        """Stop a job if it is not done, and forget it and its files; whether there was one."""
        self.cancel(job_id)
        record = self.jobs.get(job_id)
        if record is None or not self.jobs.delete(job_id):
            return False
        if self.keeper is not None:
            self.keeper.discard(record.results)
        return True

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
