"""``/v1/jobs``: what became of a piece of work of any kind, and how to stop it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from sglang.multimodal_gen.runtime.entrypoints.http.context import context_of
from sglang.multimodal_gen.runtime.entrypoints.http.errors import not_found
from sglang.multimodal_gen.runtime.entrypoints.http.job_events import events_of
from sglang.multimodal_gen.runtime.entrypoints.http.openapi import error_replies, example_reply
from sglang.multimodal_gen.runtime.managers.jobs import JobRecord
from sglang.multimodal_gen.runtime.managers.service import GenerationService
from sglang.multimodal_gen.runtime.utils.errors import Unavailable

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


class JobReply(BaseModel):
    """A job. Times are seconds since 1970."""

    id: str
    object: str = "job"
    kind: str
    status: str
    progress: int
    model: str
    priority: int
    created_at: int
    started_at: int | None = None
    completed_at: int | None = None
    expires_at: int | None = None
    warnings: list[str]
    results: list[dict[str, Any]]
    error: dict[str, Any] | None = None


_EXAMPLE = {
    "id": "5c3f0c9f7a5b4e0f8f0d7d4c8e1b2a3d",
    "object": "job",
    "kind": "image_generation",
    "status": "in_progress",
    "progress": 40,
    "model": "demo",
    "priority": 0,
    "created_at": 1760000000,
    "started_at": 1760000001,
    "completed_at": None,
    "expires_at": None,
    "warnings": [],
    "results": [],
    "error": None,
}


@router.get("/{job_id}", responses=example_reply(_EXAMPLE) | error_replies(404, 503))
async def get_job(request: Request, job_id: str) -> JobReply:
    """The state of a job: queued, in_progress, completed, failed or cancelled."""
    return _reply(_record(_service(request), job_id))


_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "`job.queued`, `job.in_progress`, ... with the job as data; the last one is "
        "final. `error` if the record goes before that.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    },
    204: {"description": "`Last-Event-ID` was the end: there is nothing to come back for."},
}


@router.get(
    "/{job_id}/events", response_class=Response, responses=_EVENTS | error_replies(404, 503)
)
async def job_events(request: Request, job_id: str) -> Response:
    """A job as server-sent events: first its state, then each change until it has ended."""
    service = _service(request)
    record = _record(service, job_id)
    return events_of(
        context_of(request),
        request,
        record,
        lambda: service.jobs.get(job_id),
        lambda record: _reply(record).model_dump(),
    )


@router.post(
    "/{job_id}/cancel",
    responses=example_reply({**_EXAMPLE, "status": "cancelled"}) | error_replies(404, 503),
)
async def cancel_job(request: Request, job_id: str) -> JobReply:
    """Stop a job, waiting or running; one that has ended stays as it is."""
    service = _service(request)
    _record(service, job_id)
    service.cancel(job_id)
    return _reply(_record(service, job_id))


def _service(request: Request) -> GenerationService:
    service = context_of(request).lifecycle.opened
    if service is None:
        raise Unavailable("the model is loading")
    return service


def _record(service: GenerationService, job_id: str) -> JobRecord:
    record = service.jobs.get(job_id)
    if record is None:
        raise not_found("there is no such job on this server, or its record has expired")
    return record


def _reply(record: JobRecord) -> JobReply:
    return JobReply(
        id=record.id,
        kind=record.kind,
        status=record.status,
        progress=record.progress,
        model=record.model,
        priority=record.priority,
        created_at=int(record.created_at),
        started_at=_whole(record.started_at),
        completed_at=_whole(record.completed_at),
        expires_at=_whole(record.expires_at),
        warnings=list(record.warnings),
        results=[dict(result) for result in record.results],
        error=None if record.error is None else dict(record.error),
    )


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
