"""Whether the server can be asked, and what it is."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool

from sglang.multimodal_gen import __version__
from sglang.multimodal_gen.runtime.entrypoints.http.context import Context, context_of
from sglang.multimodal_gen.runtime.entrypoints.http.openapi import error_replies, example_reply
from sglang.multimodal_gen.runtime.utils.errors import DiffusionError

router = APIRouter(tags=["service"])

DEEP_SECONDS = 5.0
_UNHEALTHY: dict[int | str, dict[str, Any]] = {
    503: {
        "description": "Loading, stopping, or with nothing to run a request on.",
        "content": {"application/json": {"example": {"status": "loading"}}},
    }
}


@router.get("/liveness", responses=example_reply({"status": "ok"}))
async def liveness() -> dict[str, str]:
    """The process answers; nothing is said about the model."""
    return {"status": "ok"}


@router.get("/health", responses=example_reply({"status": "ok"}) | _UNHEALTHY)
async def health(
    request: Request,
    deep: bool = Query(False, description="Ask what runs the model, too, with a time limit."),
) -> JSONResponse:
    """200 when requests are taken, 503 while the model loads, when the server stops, or when what
    runs the model is gone.
    """
    context = context_of(request)
    problem = context.lifecycle.problem
    if problem is None:
        return await _deep(context) if deep else JSONResponse({"status": "ok"})
    phase = context.lifecycle.phase
    if phase != "ready":
        return JSONResponse({"status": phase}, 503)
    return JSONResponse({"status": "unhealthy", "error": _public(problem)}, 503)


@router.get("/health/deep", responses=example_reply({"status": "ok"}) | _UNHEALTHY)
async def deep_health(request: Request) -> JSONResponse:
    """The same as ``/health?deep=1``."""
    return await health(request, deep=True)


async def _deep(context: Context) -> JSONResponse:
    service = context.lifecycle.service
    status = service.scheduler.status
    facts = {"busy": status.busy_for is not None, "heard_seconds_ago": status.busy_for}
    try:
        await asyncio.wait_for(run_in_threadpool(service.check), DEEP_SECONDS)
    except TimeoutError:
        error = f"what runs the model did not answer in {DEEP_SECONDS:g} s"
        return JSONResponse({"status": "unhealthy", "error": error, "worker": facts}, 503)
    except DiffusionError as failure:
        error = _public(str(failure))
        return JSONResponse({"status": "unhealthy", "error": error, "worker": facts}, 503)
    return JSONResponse({"status": "ok", "worker": facts})


@router.get(
    "/server_info",
    responses=example_reply({"version": __version__, "model": "demo", "phase": "ready"})
    | error_replies(503),
)
async def server_info(request: Request) -> dict[str, Any]:
    """Versions, limits, and what waits and runs."""
    context = context_of(request)
    lifecycle = context.lifecycle
    info: dict[str, Any] = {
        "version": __version__,
        "phase": lifecycle.phase,
        "uptime_seconds": round(time.time() - lifecycle.started_at, 1),
        "limits": dataclasses.asdict(context.args.limits),
        "max_queued_requests": context.args.queue.max_queued_requests,
    }
    service = lifecycle.opened
    if service is not None:
        status, args = service.scheduler.status, service.model.server_args
        info |= {
            "model": service.served_name,
            "backend": service.model.info.backend,
            "device": args.platform.device,
            "precision": args.model.precision,
            "batching_max_size": args.batching.batching_max_size,
            "queue": {
                "waiting": status.waiting,
                "running": status.running,
                "batches": status.batches,
            },
        }
    return info


_NUMBERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Prometheus' text format.",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
}


@router.get("/metrics", response_class=Response, responses=_NUMBERS)
def metrics(request: Request) -> Response:
    """Counters, histograms and gauges for Prometheus."""
    return Response(context_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _public(problem: str) -> str:
    """The first line of a reason, short: enough for an operator to look into the log."""
    return problem.partition("\n")[0][:200]
