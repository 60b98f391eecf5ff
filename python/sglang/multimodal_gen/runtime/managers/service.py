"""The service behind a server's doors: one model, its scheduler, and a record for each job.

A door (HTTP routes, one day others) turns what a client sent into a `WorkOrder`; everything from
admission on is here, the same for every kind of work.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.task_type import DataType
from sglang.multimodal_gen.runtime.managers.client_error import PATH_SETTINGS, client_error
from sglang.multimodal_gen.runtime.managers.finished import FinishedImage, pixels_of, settings_of
from sglang.multimodal_gen.runtime.managers.jobs import JobRecord, JobStore
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.managers.observer import Observer
from sglang.multimodal_gen.runtime.managers.runner import AdapterHost, Checkable
from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler
from sglang.multimodal_gen.runtime.managers.visit import charge
from sglang.multimodal_gen.runtime.managers.waiting_line import MAX_PRIORITY
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch
from sglang.multimodal_gen.runtime.utils.errors import (
    Cancelled,
    DiffusionError,
    InvalidRequest,
    Unavailable,
    UserError,
)
from sglang.multimodal_gen.runtime.utils.progress import Preview
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkOrder:
    """What a client asks for: sampling settings by name, and how they are to be served."""

    kind: str
    settings: Mapping[str, Any]
    data_type: DataType
    priority: int = 0
    timeout: float | None = None
    previews: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class FinishedJob:
    """What a job made, and what it took. ``queue_seconds`` is the wait for its first batch."""

    id: str
    images: Sequence[FinishedImage]
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


@dataclass(eq=False, slots=True)
class _Progress:
    """Keeps a job's record true while the scheduler works on it (a `waiting_line.Watcher`)."""

    record: JobRecord
    params: SamplingParams
    store: JobStore
    keep_seconds: float
    clock: Callable[[], float]
    on_preview: Callable[[Preview], None] | None
    result: Future[FinishedJob] = field(default_factory=Future)
    images: list[FinishedImage] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    peak_memory_mb: float = 0.0
    started_at: float | None = None
    percent: int = 0

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
        pixels = pixels_of(output.output)
        self.images += map(FinishedImage, pixels, output.prompt, output.seeds)
        self.warnings += [text for text in output.warnings if text not in self.warnings]
        for stage, seconds in output.timings.items():
            self.timings[stage] = self.timings.get(stage, 0.0) + seconds
        self.peak_memory_mb = max(self.peak_memory_mb, output.peak_memory_mb)

    def ended(self, error: DiffusionError | None) -> None:
        now = self.clock()
        final: dict[str, Any] = {
            "completed_at": now,
            "expires_at": now + self.keep_seconds,
            "warnings": tuple(self.warnings),
        }
        if error is None:
            results = tuple({"seed": image.seed} for image in self.images)
            final |= {"status": "completed", "progress": 100, "results": results}
        elif isinstance(error, Cancelled):
            final |= {"status": "cancelled"}
        else:
            final |= {"status": "failed", "error": client_error(error).as_object()}
        self.store.update(self.record.id, **final)
        if error is not None:
            self.result.set_exception(error)
        else:
            self.result.set_result(self._finished(now))

    def _finished(self, now: float) -> FinishedJob:
        began = now if self.started_at is None else self.started_at
        settings = settings_of(self.params)
        return FinishedJob(
            id=self.record.id,
            images=tuple(self.images),
            settings={k: v for k, v in settings.items() if k not in PATH_SETTINGS},
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
    ) -> None:
        self.model = model
        self.scheduler = scheduler
        self.jobs = jobs
        self.served_name = served_name
        self.job_ttl = job_ttl
        self.default_timeout = default_timeout
        self.notes = tuple(notes)
        self.clock = clock
        self.observer = Observer()
        self.adapters: dict[str, Any] = self._adapter_status()

    def observe(self, observer: Observer) -> None:
        """Tell ``observer`` of each job and batch from now on."""
        self.observer = self.scheduler.observer = observer

    def submit(
        self, order: WorkOrder, *, on_preview: Callable[[Preview], None] | None = None
    ) -> Job:
        """Check an order, and put it in line.

        ``on_preview`` is called from the thread that runs batches, and must not block.

        Raises:
            InvalidRequest: a setting is unknown or does not fit the model.
            QueueFull, RateLimited, Unavailable: not now.
        """
        params = self.model.sampling_params(order.settings)
        self._check_adapters(params)
        if not -MAX_PRIORITY <= order.priority <= MAX_PRIORITY:
            problem = f"must lie in -{MAX_PRIORITY}..{MAX_PRIORITY}"
            raise InvalidRequest("priority", order.priority, problem)
        parts = self.model.admit(params, data_type=order.data_type, previews=order.previews)
        book = charge(parts)
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
            record, parts[0].request, self.jobs, self.job_ttl, self.clock, on_preview
        )
        watcher.result.set_running_or_notify_cancel()  # a waiter that gives up must not cancel it
        self.jobs.add(record)  # before it can finish
        timeout = self.default_timeout if order.timeout is None else order.timeout
        try:
            self.scheduler.submit(job_id, parts, watcher, priority=order.priority, timeout=timeout)
        except DiffusionError:
            self.jobs.delete(job_id)
            raise
        book()
        self.observer.job(record, parts, watcher.result)
        return Job(job_id, watcher.result, lambda: self.cancel(job_id))

    def cancel(self, job_id: str) -> bool:
        """Stop a job, waiting or running; False where there is nothing to stop."""
        return self.scheduler.cancel(job_id)

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
