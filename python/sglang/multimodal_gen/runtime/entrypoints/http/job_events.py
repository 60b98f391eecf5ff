"""A job told as server-sent events: where it is, each change, and how it ended.

The store is asked a few times a second, so it does not matter who runs the job: this process,
another server on the same store, or one that took over after a restart. Nothing is remembered for a
listener: an event's id *is* the state that it tells (``in_progress.40``), and whoever comes back
with ``Last-Event-ID`` gets what has changed since, or at first the state as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from sglang.multimodal_gen.runtime.entrypoints.http.connection import (
    KEEP_ALIVE_SECONDS,
    disconnected,
)
from sglang.multimodal_gen.runtime.entrypoints.http.context import Context
from sglang.multimodal_gen.runtime.entrypoints.http.errors import not_found
from sglang.multimodal_gen.runtime.managers.jobs import JobRecord
from sglang.multimodal_gen.runtime.utils.errors import StoreUnavailable

POLL_SECONDS = 0.2
_RETRY_MS = 2000
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}

Look = Callable[[], JobRecord | None]
Tell = Callable[[JobRecord], dict[str, Any]]


def events_of(
    context: Context, request: Request, record: JobRecord, look: Look, tell: Tell
) -> Response:
    """The stream from ``record`` on. ``look`` reads the record again, ``tell`` is its JSON.

    Whoever has heard the end already gets 204, which tells an ``EventSource`` not to come back.
    """
    heard = request.headers.get("last-event-id")
    if record.final and heard == state_of(record):
        return Response(status_code=204)
    stream = _Stream(context, request, look, tell, heard)
    return StreamingResponse(
        stream.events(record), media_type="text/event-stream", headers=_HEADERS
    )


def state_of(record: JobRecord) -> str:
    """What a listener can see change, in one word."""
    return f"{record.status}.{record.progress}"


class _Stream:
    """One listener."""

    def __init__(
        self, context: Context, request: Request, look: Look, tell: Tell, heard: str | None
    ) -> None:
        self.context = context
        self.request = request
        self.look = look
        self.tell = tell
        self.heard = heard

    async def events(self, record: JobRecord | None) -> AsyncIterator[str]:
        """The text of the events; ends with the job, the listener or the server."""
        gone = asyncio.ensure_future(disconnected(self.request))
        quiet = 0.0
        last_look = False
        yield f"retry: {_RETRY_MS}\n\n"
        try:
            while True:
                if record is None:
                    yield self._forgotten()
                    return
                if state_of(record) != self.heard:
                    self.heard, quiet = state_of(record), 0.0
                    yield self._event(record)
                if record.final or last_look:
                    return
                await asyncio.wait({gone}, timeout=POLL_SECONDS)
                if gone.done():
                    return
                quiet += POLL_SECONDS
                if quiet >= KEEP_ALIVE_SECONDS:
                    quiet = 0.0
                    yield ": still at work\n\n"
                last_look = self._server_ends()
                with contextlib.suppress(StoreUnavailable):  # it is as it was, until we know more
                    record = await run_in_threadpool(self.look)
        finally:
            gone.cancel()

    def _event(self, record: JobRecord) -> str:
        kind = f"job.{record.status}"
        data = json.dumps({"type": kind, **self.tell(record)})
        return f"id: {state_of(record)}\nevent: {kind}\ndata: {data}\n\n"

    def _forgotten(self) -> str:
        error = not_found("the job's record has expired or was deleted").error
        return f"event: error\ndata: {json.dumps({'error': error.as_object()})}\n\n"

    def _server_ends(self) -> bool:
        """Whether this server stops and has nothing left to run: a listener must not hold it."""
        lifecycle = self.context.lifecycle
        if lifecycle.phase in ("loading", "ready"):
            return False
        if lifecycle.opened is None:
            return True
        status = lifecycle.opened.scheduler.status
        return not status.running and not status.waiting
