"""``/docs``: Swagger UI on this server's schema, from a package and not from a CDN.

A machine without the internet shows it too, and nobody else's script runs beside the key that its
reader types in.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import Response

from sglang.multimodal_gen.runtime.entrypoints.http.errors import not_found

router = APIRouter(include_in_schema=False)

_PACKAGE = "fastapi_offline"
_TYPES = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>SGLang-Diffusion: the API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
_START = """SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  layout: "BaseLayout",
  presets: [SwaggerUIBundle.presets.apis],
  validatorUrl: null,
});
"""
_HEADERS = {
    # Swagger UI sets styles of its elements, and draws its signs from data URLs.
    "content-security-policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; media-src 'self' blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@router.get("/docs")
def docs(request: Request) -> Response:
    """The page."""
    return Response(_PAGE, media_type="text/html", headers=_HEADERS)


@router.get("/docs/{name}")
def docs_file(request: Request, name: str) -> Response:
    """A file of the page."""
    found = _files().get(name)
    if found is None:
        raise not_found("the page has no such file")
    data, media_type = found
    return Response(data, media_type=media_type, headers=_HEADERS)


@functools.cache
def _files() -> Mapping[str, tuple[bytes, str]]:
    """All files of the page by name, with their types."""
    folder = resources.files(_PACKAGE) / "static"
    found = {name: ((folder / name).read_bytes(), kind) for name, kind in _TYPES.items()}
    return found | {"start.js": (_START.encode(), "text/javascript")}
