"""Headers that say how a request is to be served: keys, and answers that need no waiting."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from fastapi import Request

from sglang.multimodal_gen.runtime.entrypoints.http.errors import invalid
from sglang.multimodal_gen.runtime.managers.jobs import IdempotencyKey
from sglang.multimodal_gen.runtime.managers.visit import current_client

_KEY = "Idempotency-Key"
_MAX_KEY = 255

PARAMETERS: list[dict[str, Any]] = [
    {
        "name": _KEY,
        "in": "header",
        "required": False,
        "description": "The client's own name for this request: sent again with the same body, "
        "it is answered with the same job. With another body it is refused (422).",
        "schema": {"type": "string", "maxLength": _MAX_KEY},
    },
    {
        "name": "Prefer",
        "in": "header",
        "required": False,
        "description": "`respond-async` answers 202 with the job at once; the job survives the "
        "connection and a restart of the server.",
        "schema": {"type": "string"},
    },
]
"""For the schema of routes that heed them."""


def wants_no_wait(request: Request) -> bool:
    """Whether the client prefers to be answered with the job (RFC 7240)."""
    words = [
        word.partition(";")[0].strip().lower()
        for text in request.headers.getlist("prefer")
        for word in text.split(",")
    ]
    return "respond-async" in words


def idempotency_key(
    request: Request, asked: Any, files: Iterable[bytes] = ()
) -> IdempotencyKey | None:
    """The request's key, with a fingerprint of what is ``asked`` and of the files' contents.

    Raises:
        ApiError: it is empty, too long, or not printable.
    """
    key = request.headers.get(_KEY)
    if key is None:
        return None
    if not 0 < len(key) <= _MAX_KEY or not (key.isascii() and key.isprintable()):
        problem = f"must be 1 to {_MAX_KEY} printable ASCII characters"
        raise invalid(_KEY, f"{_KEY}: {problem}")
    digest = hashlib.sha256(request.url.path.encode())
    digest.update(json.dumps(asked, sort_keys=True, default=str).encode())
    for data in files:
        digest.update(hashlib.sha256(data).digest())
    return IdempotencyKey(key, digest.hexdigest(), scope=current_client() or "")
