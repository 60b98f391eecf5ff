"""Errors on the wire: OpenAI's shape, the right status, and nothing of the machine's insides."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang.multimodal_gen.runtime.entrypoints.http.request_log import ERROR_CODE_HEADER
from sglang.multimodal_gen.runtime.managers.client_error import ClientError, client_error
from sglang.multimodal_gen.runtime.utils.errors import DiffusionError

logger = logging.getLogger(__name__)

_CODES = {404: "not_found", 405: "method_not_allowed", 413: "too_large", 415: "unsupported_media"}


class ApiError(Exception):
    """An answer that is an error, raised by a route."""

    def __init__(self, error: ClientError) -> None:
        self.error = error
        super().__init__(error.message)


def invalid(param: str | None, message: str, *, code: str = "invalid_value") -> ApiError:
    """A client's mistake."""
    return ApiError(ClientError(400, message, param=param, code=code))


def not_found(message: str, *, param: str | None = None, code: str = "not_found") -> ApiError:
    """An id or a name that leads nowhere."""
    return ApiError(ClientError(404, message, param=param, code=code))


def answer(error: ClientError) -> JSONResponse:
    """The response."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if not error.retry:
        headers["x-should-retry"] = "false"  # OpenAI's clients heed it
    if error.code is not None:
        headers[ERROR_CODE_HEADER] = error.code
    return JSONResponse({"error": error.as_object()}, error.status, headers)


def of_diffusion_error(error: DiffusionError) -> ClientError:
    """An error of the runtime for a client; what is ours to mend goes to the log in full."""
    told = client_error(error)
    if told.status >= 500 and told.code not in ("unavailable", "deadline_exceeded"):
        logger.error("%s", error, exc_info=error)
    return told


def add_error_handlers(app: FastAPI) -> None:
    """Give every error of ``app`` the same shape."""

    @app.exception_handler(ApiError)
    async def _api(request: Request, error: ApiError) -> JSONResponse:
        return answer(error.error)

    @app.exception_handler(DiffusionError)
    async def _diffusion(request: Request, error: DiffusionError) -> JSONResponse:
        return answer(of_diffusion_error(error))

    @app.exception_handler(RequestValidationError)
    async def _validation(request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(of_validation(error.errors()[0]))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        code = _CODES.get(error.status_code, "invalid_request")
        return answer(ClientError(error.status_code, str(error.detail), code=code))


def of_validation(fault: Mapping[str, Any]) -> ClientError:
    """The first fault that pydantic found, with the field's name and without its value."""
    where = [str(part) for part in fault["loc"] if part not in ("body", "query", "path")]
    if fault["type"] == "json_invalid":
        return ClientError(400, "the body is no valid JSON", code="invalid_json")
    param = where[0] if where else None  # what follows names a kind of value, or a place in it
    if fault["type"] == "missing":
        if param is None:
            return ClientError(400, "the body is missing; send JSON", code="missing_body")
        return ClientError(400, f"{param}: is missing", param=param, code="missing_parameter")
    if param is None and fault["type"] == "model_attributes_type":
        message = "the body is not read as JSON; send it with 'Content-Type: application/json'"
        return ClientError(400, message, code="invalid_json")
    text = str(fault["msg"]).removeprefix("Value error, ")
    return ClientError(400, f"{param or 'body'}: {text}", param=param, code="invalid_value")


class LastResort:
    """ASGI middleware: an error that nobody foresaw is a plain 500, and its story is in the log."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        begun = False

        async def watched(message: Any) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception:  # the HTTP boundary
            if scope["type"] != "http" or begun:
                raise
            logger.exception("%s %s failed", scope.get("method"), scope.get("path"))
            message = "the server failed; its log says why"
            error = ClientError(500, message, "server_error", None, "internal_error", retry=False)
            await answer(error)(scope, receive, send)


class BodyLimit:
    """ASGI middleware: refuses a body that is too large, as soon as that is known."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting what comes in."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > self.max_bytes):
            await answer(self._error())(scope, receive, send)
            return
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_bytes:
                raise HTTPException(413, self._error().message)
            return message

        await self.app(scope, counted, send)

    def _error(self) -> ClientError:
        limit = f"{self.max_bytes / 2**20:g} MiB"
        return ClientError(413, f"the body is larger than {limit}", code="too_large")
