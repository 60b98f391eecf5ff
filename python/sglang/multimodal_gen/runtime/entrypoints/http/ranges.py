"""Parts of a file: what a video player asks for when somebody jumps (RFC 9110, 14)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fastapi import Request
from fastapi.responses import Response

_ONE_RANGE = re.compile(r"bytes=\s*(\d{0,18})\s*-\s*(\d{0,18})\s*", re.ASCII)


def ranged_response(
    request: Request, data: bytes, media_type: str, etag: str, headers: Mapping[str, str]
) -> Response:
    """All of ``data`` (200), the one range that is asked for (206), or a refusal (416).

    Several ranges at once, and what is no range, are answered with everything, as is allowed.
    """
    headers = {**headers, "accept-ranges": "bytes", "etag": f'"{etag}"'}
    wanted = _wanted(request, len(data), f'"{etag}"')
    if wanted is None:
        return Response(data, 200, headers, media_type)
    start, stop = wanted
    if start >= stop:
        return Response(b"", 416, headers | {"content-range": f"bytes */{len(data)}"})
    headers["content-range"] = f"bytes {start}-{stop - 1}/{len(data)}"
    return Response(data[start:stop], 206, headers, media_type)


def _wanted(request: Request, size: int, etag: str) -> tuple[int, int] | None:
    """The range as start and stop, which are equal where there is nothing in it."""
    match = _ONE_RANGE.fullmatch(request.headers.get("range", ""))
    condition = request.headers.get("if-range")
    if match is None or condition not in (None, etag):
        return None
    first, last = match[1], match[2]
    if not first:
        return None if not last else (max(0, size - int(last)), size)
    if last and int(last) < int(first):
        return None
    stop = size if not last else min(size, int(last) + 1)
    return min(int(first), size), max(min(int(first), size), stop)
