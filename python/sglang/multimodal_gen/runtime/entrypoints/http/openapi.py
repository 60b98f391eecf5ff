"""Parts of the OpenAPI schema that many routes share."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from sglang.multimodal_gen.runtime.entrypoints.http.guard import OPEN_PATHS

_MEANING = {
    400: ("A value is wrong; `param` names it.", "invalid_request_error", "invalid_value"),
    401: (
        "A key is needed, see the WWW-Authenticate header.",
        "invalid_request_error",
        "missing_api_key",
    ),
    403: ("This server does not allow it.", "invalid_request_error", "not_allowed"),
    404: ("There is no such thing here.", "invalid_request_error", "not_found"),
    409: ("The request was cancelled.", "invalid_request_error", "cancelled"),
    413: ("The body is too large.", "invalid_request_error", "too_large"),
    415: ("Another content type is needed.", "invalid_request_error", "unsupported_media"),
    422: (
        "The idempotency key came before with another request.",
        "invalid_request_error",
        "idempotency_key_reused",
    ),
    429: ("As much waits as may; see the Retry-After header.", "rate_limit_error", "queue_full"),
    500: ("The server failed; its log says why.", "server_error", "internal_error"),
    503: ("Not ready, or stopping; see the Retry-After header.", "server_error", "unavailable"),
    504: ("The request's own time limit passed.", "server_error", "deadline_exceeded"),
    507: ("The result could not be stored.", "server_error", "storage_full"),
}


class ErrorObject(BaseModel):
    """What went wrong, as OpenAI's API says it."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    """The body of every error."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "error": {
                        "message": "n=0: must be at least 1",
                        "type": "invalid_request_error",
                        "param": "n",
                        "code": "invalid_value",
                    }
                }
            ]
        }
    )

    error: ErrorObject


def error_replies(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route that may answer with these errors."""
    replies: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        text, kind, code = _MEANING[status]
        example = {"error": {"message": text, "type": kind, "param": None, "code": code}}
        replies[status] = {
            "model": ErrorReply,
            "description": text,
            "content": {"application/json": {"example": example}},
        }
    return replies


def example_reply(value: Any) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route with an example of its success."""
    return {200: {"content": {"application/json": {"example": value}}}}


def with_keys(schema: dict[str, Any]) -> dict[str, Any]:
    """What every route may answer where clients have keys, added to a schema."""
    components = schema.setdefault("components", {})
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    refusals = {str(k): v for k, v in error_replies(401, 429).items()}
    for reply in refusals.values():
        del reply["model"]
        reply["content"]["application/json"]["schema"] = {"$ref": "#/components/schemas/ErrorReply"}
    for path, item in schema["paths"].items():
        if path in OPEN_PATHS:
            continue
        for route in item.values():
            route["security"] = [{"key": []}, {}]  # {}: a server without keys asks for none
            route["responses"] = refusals | route["responses"]
    return schema


def without_validation_replies(schema: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's own 422 taken out of a schema: such faults are 400 here, in the common shape."""
    for item in schema["paths"].values():
        for route in item.values():
            if _is_validation(route["responses"].get("422", {})):
                del route["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        schema.get("components", {}).get("schemas", {}).pop(name, None)
    return schema


def _is_validation(reply: dict[str, Any]) -> bool:
    schema = reply.get("content", {}).get("application/json", {}).get("schema", {})
    return str(schema.get("$ref", "")).endswith("/HTTPValidationError")
