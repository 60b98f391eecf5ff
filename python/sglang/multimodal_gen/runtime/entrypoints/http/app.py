"""The HTTP application: routes, limits and errors around one service."""

from __future__ import annotations

import asyncio
import contextlib
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
    videos,
)
from sglang.multimodal_gen.runtime.entrypoints.http.context import Context
from sglang.multimodal_gen.runtime.entrypoints.http.errors import (
    BodyLimit,
    LastResort,
    add_error_handlers,
)
from sglang.multimodal_gen.runtime.entrypoints.http.openapi import without_validation_replies

SWEEP_SECONDS = 0.5
_ROOMS = (images, videos, models, jobs, loras, files, health)


class _App(FastAPI):
    """FastAPI, with our errors in its schema."""

    def openapi(self) -> dict[str, Any]:
        """The schema, made once."""
        return without_validation_replies(super().openapi())


def create_app(context: Context) -> FastAPI:
    """The application; the model may still be loading."""
    app = _App(
        title="SGLang-Diffusion",
        version=__version__,
        summary="Pictures and videos from diffusion models, in OpenAI's API.",
        lifespan=_lifespan,
        docs_url="/docs",
        redoc_url=None,
    )
    app.state.context = context
    for room in _ROOMS:
        app.include_router(room.router)
    add_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=int(context.args.limits.max_body_mb * 2**20))
    app.add_middleware(LastResort)
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
    now = time.time()
    service = context.lifecycle.opened
    if service is not None:
        service.scheduler.sweep()
        service.jobs.sweep(now)
    if context.files is not None:
        context.files.sweep(now)
