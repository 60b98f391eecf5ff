"""Pictures that a client names by address: the one place where that is allowed or refused."""

from __future__ import annotations

from pathlib import Path

from sglang.multimodal_gen.runtime.entrypoints.http.errors import invalid


async def fetch_image(address: str, place: Path, param: str) -> None:
    """Fetch the picture at ``address`` into the file ``place``.

    No policy allows any address yet: links, paths and data URLs are refused alike, without a look
    at what they name.

    Raises:
        ApiError: it may not be fetched.
    """
    message = f"{param}: must be an uploaded file; links and paths are not fetched by this server"
    raise invalid(param, message, code="fetch_not_allowed")
