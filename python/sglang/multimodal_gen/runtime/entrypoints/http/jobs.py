"""``/v1/jobs``: what became of a piece of work of any kind, what it made, and how to stop it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from sglang.multimodal_gen.runtime.entrypoints.http.context import context_of
from sglang.multimodal_gen.runtime.entrypoints.http.errors import ApiError, invalid, not_found
from sglang.multimodal_gen.runtime.entrypoints.http.job_events import events_of
from sglang.multimodal_gen.runtime.entrypoints.http.openapi import error_replies, example_reply
from sglang.multimodal_gen.runtime.managers.client_error import ClientError
from sglang.multimodal_gen.runtime.managers.jobs import JobRecord
from sglang.multimodal_gen.runtime.managers.service import GenerationService
from sglang.multimodal_gen.runtime.managers.visit import may_see
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
    attempts: int = Field(1, description="How often a server began with it.")
    resumed_at_step: int | None = Field(
        None, description="Steps that were not done again when it went on after an interruption."
    )
    warnings: list[str]
    results: list[dict[str, Any]]
    error: dict[str, Any] | None = None


_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {"description": "The output.", "content": {"image/*": {"schema": {"type": "string"}}}}
}
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
    "attempts": 1,
    "resumed_at_step": None,
    "warnings": [],
    "results": [],
    "error": None,
}


@router.get("/{job_id}", responses=example_reply(_EXAMPLE) | error_replies(404, 503))
async def get_job(request: Request, job_id: str) -> JobReply:
    """The state of a job: queued, in_progress, completed, failed or cancelled."""
    return _reply(await run_in_threadpool(_record, _service(request), job_id))


@router.get(
    "/{job_id}/content",
    response_class=Response,
    responses=_CONTENT | error_replies(400, 404, 409, 503),
)
async def get_content(
    request: Request,
    job_id: str,
    index: int = Query(0, description="Which of the outputs, from 0.", ge=0),
) -> Response:
    """What a job made, where it was kept; of a job of any server on the same job store."""
    service = _service(request)
    record = await run_in_threadpool(_record, service, job_id)
    if record.status != "completed":
        message = f"the job is {record.status}; only a completed one has content"
        raise ApiError(ClientError(409, message, code="not_completed"))
    if index >= len(record.results):
        raise invalid("index", f"index={index}: the job has {len(record.results)} outputs")
    result = record.results[index]
    if service.files is None or "file_id" not in result:
        message = "the job's outputs were not kept: they went to the one who waited for them"
        raise not_found(message, code="not_kept")
    data = await run_in_threadpool(service.files.read, result["file_id"])
    if data is None:
        raise not_found("the output has expired")
    headers = {"cache-control": "private", "x-content-type-options": "nosniff"}
    return Response(data, media_type=result["content_type"], headers=headers)


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
    record = await run_in_threadpool(_record, service, job_id)
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
    """Stop a job, waiting or running; one that has ended stays as it is. That of another server
    on the same job store is stopped by that server, within a second or so.
    """
    service = _service(request)
    await run_in_threadpool(_record, service, job_id)
    await run_in_threadpool(service.cancel, job_id)
    return _reply(await run_in_threadpool(_record, service, job_id))


def accepted(service: GenerationService, job_id: str) -> JSONResponse:
    """The answer to a client that does not wait: the job, and where to ask for it."""
    reply = _reply(_record(service, job_id))
    headers = {"location": f"/v1/jobs/{job_id}", "preference-applied": "respond-async"}
    return JSONResponse(reply.model_dump(), 202, headers)


def _service(request: Request) -> GenerationService:
    service = context_of(request).lifecycle.opened
    if service is None:
        raise Unavailable("the model is loading")
    return service


def _record(service: GenerationService, job_id: str) -> JobRecord:
    record = service.jobs.get(job_id)
    if record is None or not may_see(record.client):
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
        attempts=record.attempts,
        resumed_at_step=record.resumed_at_step,
        warnings=list(record.warnings),
        results=[dict(result) for result in record.results],
        error=None if record.error is None else dict(record.error),
    )


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
