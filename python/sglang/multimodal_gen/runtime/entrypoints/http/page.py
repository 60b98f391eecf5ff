"""The page at ``/``: static files that ship inside the package, and nothing from elsewhere.

They are read when first asked for, by names that the folder itself gave: no path of a client's
reaches the file system. What they hold is no secret, so they need no API key; the page asks its
reader for one when ``/v1`` does.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import Response

from sglang.multimodal_gen.runtime.entrypoints.http.errors import not_found

router = APIRouter(include_in_schema=False)

START = "index.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "media-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",  # asked again each time, and answered 304
}


@dataclass(frozen=True, slots=True)
class _Asset:
    data: bytes
    media_type: str
    etag: str


@router.api_route("/", methods=["GET", "HEAD"])
def start_page(request: Request) -> Response:
    """The page."""
    return _served(request, START)


@router.api_route("/page/{name}", methods=["GET", "HEAD"])
def asset(request: Request, name: str) -> Response:
    """A file of the page."""
    return _served(request, name)


def _served(request: Request, name: str) -> Response:
    found = _assets().get(name)
    if found is None:
        raise not_found("the page has no such file")
    headers = {**_HEADERS, "etag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.data, media_type=found.media_type, headers=headers)


@functools.cache
def _assets() -> Mapping[str, _Asset]:
    """All files of the page by name."""
    folder = resources.files("sglang.multimodal_gen.runtime.entrypoints.http") / "static"
    found = {}
    for file in folder.iterdir():
        media_type = _TYPES.get(file.name.rpartition(".")[2])
        if media_type is not None:
            data = file.read_bytes()
            etag = f'"{hashlib.sha256(data).hexdigest()[:24]}"'
            found[file.name] = _Asset(data, media_type, etag)
    return found
