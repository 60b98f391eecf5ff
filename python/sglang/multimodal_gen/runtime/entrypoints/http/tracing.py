"""OpenTelemetry traces: a request, its wait, the batch it was part of, and that batch's stages.

The libraries are an extra: this module imports them only when a tracer is opened. No provider of
the process is touched: whoever embeds this keeps their own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang.multimodal_gen import __version__
from sglang.multimodal_gen.runtime.entrypoints.http.request_log import route_of
from sglang.multimodal_gen.runtime.managers.jobs import JobRecord
from sglang.multimodal_gen.runtime.managers.observer import Made, Observer
from sglang.multimodal_gen.runtime.managers.visit import current_visit
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch, Req
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanProcessor

_SERVICE = "sglang-diffusion"
_NANO = 10**9


class Tracing(Observer):
    """Makes the spans of one server, and hands them to ``processor``.

    Raises:
        InvalidArgument: the libraries are not installed.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.api = trace
        resource = Resource.create({"service.name": _SERVICE, "service.version": __version__})
        # It is closed with the server, not when the interpreter ends.
        self.provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.provider.add_span_processor(processor)
        self.tracer = self.provider.get_tracer(_SERVICE, __version__)
        self.propagator = TraceContextTextMapPropagator()
        self._requests: dict[str, tuple[Any, int | None]] = {}
        """Job id -> the context of its request's span, and since when it waits."""

    def close(self) -> None:
        """Send what is left."""
        self.provider.shutdown()

    def job(self, record: JobRecord, parts: Sequence[Req], result: Future[Any]) -> None:
        """Join a job to the request that asked for it; its wait becomes a span when it is over."""
        here = self.api.get_current_span()
        context = self.api.set_span_in_context(here)
        here.set_attribute("sglang.job.id", record.id)
        created = time.time_ns()
        self._requests[record.id] = (context, created)
        result.add_done_callback(lambda _: self._requests.pop(record.id, None))

    @contextlib.contextmanager
    def batch(self, batch: Req, jobs: Sequence[str]) -> Iterator[Made]:
        """A span for the batch: below the first request that it is for, linked to the others."""
        begun = time.time_ns()
        contexts = [self._waited(job, begun) for job in jobs]
        others = [self.api.get_current_span(c).get_span_context() for c in contexts[1:] if c]
        attributes = {
            "sglang.batch.size": batch.batch_size,
            "sglang.batch.jobs": len(jobs),
            "sglang.steps": batch.num_inference_steps,
            "sglang.height": batch.height,
            "sglang.width": batch.width,
        }
        with self.tracer.start_as_current_span(
            "batch",
            context=contexts[0],
            attributes=attributes,
            links=[self.api.Link(other) for other in others],
            start_time=begun,
        ) as span:

            def made(output: OutputBatch) -> None:
                self._stages(span, output)

            yield made

    def _waited(self, job: str, begun: int) -> Any:
        """The context of a job's request; its wait, if this is its first batch, is over."""
        context, created = self._requests.get(job, (None, None))
        if created is not None:
            self._requests[job] = (context, None)
            waiting = self.tracer.start_span("queue", context=context, start_time=created)
            waiting.set_attribute("sglang.job.id", job)
            waiting.end(begun)
        return context

    def _stages(self, batch: Any, output: OutputBatch) -> None:
        """Spans of the stages, which ran one after the other and ended now."""
        below = self.api.set_span_in_context(batch)
        end = time.time_ns()
        at = end - int(sum(output.timings.values()) * _NANO)
        for stage, seconds in output.timings.items():
            span = self.tracer.start_span(stage, context=below, start_time=at)
            at += int(seconds * _NANO)
            span.end(at)


class TraceRequests:
    """ASGI middleware: a span for each request, in the caller's trace if it names one."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self.app = app
        self.tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        tracing = self.tracing
        context = tracing.propagator.extract(dict(Headers(scope=scope)))
        kind = tracing.api.SpanKind.SERVER
        with tracing.tracer.start_as_current_span(
            scope["method"], context=context, kind=kind
        ) as span:
            visit = current_visit()
            span.set_attribute("http.request.method", scope["method"])
            span.set_attribute("http.request.id", "" if visit is None else visit.request_id)

            async def watched(message: Any) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(tracing.api.StatusCode.ERROR)
                await send(message)

            await self.app(scope, receive, watched)
            span.update_name(f"{scope['method']} {route_of(scope)}")
            span.set_attribute("http.route", route_of(scope))


def open_tracing(endpoint: str | None) -> Tracing | None:
    """Traces that go to an OTLP/HTTP address; None without one.

    Raises:
        InvalidArgument: the libraries are not installed.
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        problem = "needs OpenTelemetry: pip install 'sglang-diffusion[otel]'."
        raise InvalidArgument("otlp_traces_endpoint", endpoint, problem) from error
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
