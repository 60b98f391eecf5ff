"""``/v1/files``: the pictures that replies link to."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from sglang.multimodal_gen.runtime.entrypoints.http.context import context_of
from sglang.multimodal_gen.runtime.entrypoints.http.errors import not_found
from sglang.multimodal_gen.runtime.entrypoints.http.openapi import error_replies
from sglang.multimodal_gen.runtime.managers.visit import may_see

router = APIRouter(prefix="/v1/files", tags=["files"])

_FILE: dict[int | str, dict[str, Any]] = {
    200: {"description": "The picture.", "content": {"image/*": {"schema": {"type": "string"}}}}
}


@router.get("/{file_id}", response_class=Response, responses=_FILE | error_replies(404))
async def get_file(request: Request, file_id: str) -> Response:
    """A picture, until it expires."""
    store = context_of(request).files
    known = None if store is None else await run_in_threadpool(store.get, file_id)
    if store is None or known is None or known.expires_at <= time.time():
        raise not_found("there is no such file, or it has expired")
    if not may_see(known.client):  # told in the same words: not even that it exists
        raise not_found("there is no such file, or it has expired")
    data = await run_in_threadpool(store.read, file_id)
    if data is None:
        raise not_found("there is no such file, or it has expired")
    left = max(0, int(known.expires_at - time.time()))
    headers = {"cache-control": f"private, max-age={left}", "x-content-type-options": "nosniff"}
    return Response(data, media_type=known.media_type, headers=headers)
