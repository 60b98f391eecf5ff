"""The HTTP application: routes, limits and errors around one service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from sglang.multimodal_gen import __version__
from sglang.multimodal_gen.runtime.entrypoints.http import (
    files,
    health,
    images,
    jobs,
    loras,
    models,
    page,
    schema_page,
    videos,
)
from sglang.multimodal_gen.runtime.entrypoints.http.context import Context
from sglang.multimodal_gen.runtime.entrypoints.http.errors import (
    BodyLimit,
    LastResort,
    add_error_handlers,
)
from sglang.multimodal_gen.runtime.entrypoints.http.guard import Guard
from sglang.multimodal_gen.runtime.entrypoints.http.openapi import (
    with_keys,
    without_validation_replies,
)
from sglang.multimodal_gen.runtime.entrypoints.http.request_facts import RequestFacts
from sglang.multimodal_gen.runtime.entrypoints.http.request_log import RequestLogger, write_line
from sglang.multimodal_gen.runtime.entrypoints.http.tracing import TraceRequests
from sglang.multimodal_gen.runtime.managers.observer import Observer, Observers
from sglang.multimodal_gen.runtime.utils.errors import StoreUnavailable

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 0.5
_ROOMS = (images, videos, models, jobs, loras, files, health, page, schema_page)


class _App(FastAPI):
    """FastAPI, with our errors in its schema."""

    def openapi(self) -> dict[str, Any]:
        """The schema, made once."""
        if self.openapi_schema is None:
            self.openapi_schema = with_keys(without_validation_replies(super().openapi()))
        return self.openapi_schema


def create_app(context: Context) -> FastAPI:
    """The application; the model may still be loading."""
    app = _App(
        title="SGLang-Diffusion",
        version=__version__,
        summary="Pictures and videos from diffusion models, in OpenAI's API.",
        lifespan=_lifespan,
        docs_url=None,  # FastAPI's own takes its scripts from a CDN; `schema_page` has it
        redoc_url=None,
    )
    app.state.context = context
    for room in _ROOMS:
        app.include_router(room.router)
    add_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=int(context.args.limits.max_body_mb * 2**20))
    # From here on outwards: what is refused here reaches nothing above.
    app.add_middleware(Guard, guard=context.args.guard)
    app.add_middleware(LastResort)
    heard = [write_line, context.metrics.answered]
    observers: list[Observer] = [context.metrics, RequestFacts()]
    context.metrics.watch(context.lifecycle)
    if context.tracing is not None:
        observers.append(context.tracing)
        app.add_middleware(TraceRequests, tracing=context.tracing)
    app.add_middleware(RequestLogger, heard=tuple(heard))
    context.lifecycle.observer = Observers(*observers)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Deadlines and expiry are looked after for as long as the server is up."""
    sweeping = asyncio.create_task(_sweep_for_ever(app.state.context))
    try:
        yield
    finally:
        sweeping.cancel()


async def _sweep_for_ever(context: Context) -> None:
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        await run_in_threadpool(sweep, context)


def sweep(context: Context) -> None:
    """End what is overdue, and forget what has expired."""
    service = context.lifecycle.opened
    if service is None:
        return
    try:
        service.sweep(time.time())
    except StoreUnavailable as error:  # it is tried again in a moment
        logger.warning("%s", error)
    except Exception:  # the next sweep must come: without it nothing expires any more
        logger.exception("a sweep failed")
