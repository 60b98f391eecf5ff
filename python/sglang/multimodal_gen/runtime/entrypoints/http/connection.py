"""What routes that answer slowly know of the line to their client."""

from __future__ import annotations

from fastapi import Request

KEEP_ALIVE_SECONDS = 15.0


async def disconnected(request: Request) -> None:
    """Return when the client has gone; for requests whose body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
