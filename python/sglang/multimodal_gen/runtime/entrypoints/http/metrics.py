"""``/metrics``: numbers for Prometheus, in a registry of the app's own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from sglang.multimodal_gen.runtime.entrypoints.http.request_log import Answered
from sglang.multimodal_gen.runtime.managers.client_error import client_error
from sglang.multimodal_gen.runtime.managers.jobs import JobRecord
from sglang.multimodal_gen.runtime.managers.lifecycle import Lifecycle
from sglang.multimodal_gen.runtime.managers.observer import Made, Observer
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch, Req
from sglang.multimodal_gen.runtime.utils.errors import Cancelled, DiffusionError

_PREFIX = "sglang_"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
REJECTIONS = frozenset(
    {"queue_full", "rate_limit_exceeded", "missing_api_key", "invalid_api_key", "not_allowed",
     "too_large", "unavailable"}
)  # fmt: skip
"""Codes of requests that were sent away without a look at what they ask for."""


class Metrics(Observer):
    """All numbers of one server. Labels have few values: none of them is a client's own word."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        made: dict[str, Any] = {"registry": registry}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, **made)

        def histogram(name: str, text: str, *labels: str, buckets: Any = _SECONDS) -> Histogram:
            return Histogram(_PREFIX + name, text, labels, buckets=buckets, **made)

        self.requests = counter("http_requests", "Requests answered.", "method", "route", "code")
        self.request_seconds = histogram("http_request_seconds", "To the last byte.", "route")
        self.errors = counter("errors", "Errors told to clients.", "code")
        self.rejected = counter("rejected", "Requests sent away at the door.", "reason")
        self.jobs = counter("jobs", "Jobs that ended.", "kind", "status")
        self.job_errors = counter("job_errors", "Jobs that failed.", "code")
        self.queue_seconds = histogram("queue_seconds", "A job's wait for its first batch.")
        self.job_seconds = histogram("job_seconds", "From a job's first batch to its end.")
        self.images = counter("outputs", "Pictures and videos made.")
        self.batches = counter("batches", "Batches run.", "outcome")
        self.batch_size = histogram("batch_size", "Outputs of a batch.", buckets=_SIZES)
        self.batch_jobs = histogram("batch_jobs", "Jobs in a batch.", buckets=_SIZES)
        self.batch_seconds = histogram("batch_seconds", "A batch, from start to end.")
        self.steps = counter("denoising_steps", "Denoising steps of finished batches.")
        self.forwards = counter(
            "step_cache_forwards", "Forwards of outputs with a step cache.", "blocks"
        )
        self.stage_seconds = histogram("stage_seconds", "A stage of a batch.", "stage")
        self.peak = Gauge(
            _PREFIX + "batch_peak_memory_mebibytes", "Peak memory of the last batch.", **made
        )

    def watch(self, lifecycle: Lifecycle) -> None:
        """Read what waits and runs whenever the numbers are asked for."""
        self.registry.register(_Now(lifecycle))

    def answered(self, done: Answered) -> None:
        """Count a request that is over."""
        self.requests.labels(_method(done.method), done.route, str(done.status)).inc()
        self.request_seconds.labels(done.route).observe(done.seconds)
        if done.error_code is not None:
            self.errors.labels(done.error_code).inc()
            if done.error_code in REJECTIONS:
                self.rejected.labels(done.error_code).inc()

    def job(self, record: JobRecord, parts: Sequence[Req], result: Future[Any]) -> None:
        """Count the job when it ends."""
        result.add_done_callback(lambda result: self._job_ended(record.kind, result))

    def _job_ended(self, kind: str, result: Future[Any]) -> None:
        error = result.exception()
        if error is None:
            finished = result.result()
            self.jobs.labels(kind, "completed").inc()
            self.images.inc(max(len(finished.results), len(finished.images) + len(finished.videos)))
            self.queue_seconds.observe(max(0.0, finished.queue_seconds))
            self.job_seconds.observe(max(0.0, finished.run_seconds))
        elif isinstance(error, Cancelled):
            self.jobs.labels(kind, "cancelled").inc()
        else:
            known = isinstance(error, DiffusionError)
            code = client_error(error).code if known else "internal_error"
            self.jobs.labels(kind, "failed").inc()
            self.job_errors.labels(code or "internal_error").inc()

    @contextlib.contextmanager
    def batch(self, batch: Req, jobs: Sequence[str]) -> Iterator[Made]:
        """Count a batch, and time it."""
        start, outcome = time.perf_counter(), "failed"

        def made(output: OutputBatch) -> None:
            nonlocal outcome
            outcome = "completed"
            self.steps.inc(batch.num_inference_steps)
            if (used := output.step_cache) is not None:
                self.forwards.labels("computed").inc(used.computed)
                self.forwards.labels("left_out").inc(used.left_out)
            self.peak.set(output.peak_memory_mb)
            for stage, seconds in output.timings.items():
                self.stage_seconds.labels(stage).observe(seconds)

        try:
            yield made
        except Cancelled:
            outcome = "cancelled"
            raise
        finally:
            self.batches.labels(outcome).inc()
            self.batch_size.observe(batch.batch_size)
            self.batch_jobs.observe(len(jobs))
            self.batch_seconds.observe(time.perf_counter() - start)

    def text(self) -> bytes:
        """The numbers as Prometheus reads them."""
        return generate_latest(self.registry)


class _Now(Collector):
    """What waits, runs and is held at the moment of the question."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The gauges."""
        service = self._lifecycle.opened
        ready = self._lifecycle.problem is None
        yield _gauge("ready", "1 if requests are taken.", float(ready))
        if service is not None:
            status = service.scheduler.status
            most = service.scheduler.limits.max_waiting
            yield _gauge("queue_waiting", "Jobs that wait.", status.waiting)
            yield _gauge("queue_running", "Jobs of the batch that runs.", status.running)
            yield _gauge("queue_capacity", "Jobs that may wait.", most)
        if torch.cuda.is_available():
            held = [torch.cuda.memory_allocated(d) for d in range(torch.cuda.device_count())]
            yield _gauge("device_memory_bytes", "Held on this process's devices.", sum(held))


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, text, value)


def _method(name: str) -> str:
    known = ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH")
    return name if name in known else "other"
