"""What every request for outputs goes through: this server's limits, and refusals in its words."""

from __future__ import annotations

from sglang.multimodal_gen.runtime.entrypoints.http.errors import ApiError
from sglang.multimodal_gen.runtime.entrypoints.http.image_schemas import (
    GenerationSettings,
    as_client_named,
)
from sglang.multimodal_gen.runtime.managers.client_error import ClientError, client_error
from sglang.multimodal_gen.runtime.server_args.serving import LimitArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest


def check_limits(settings: GenerationSettings, limits: LimitArgs) -> None:
    """Refuse more than this server lets one request ask for.

    Raises:
        InvalidRequest: names the field.
    """
    if settings.n is not None and settings.n > limits.max_images_per_request:
        problem = f"must be at most {limits.max_images_per_request} on this server"
        raise InvalidRequest("n", settings.n, problem)
    for name in ("prompt", "negative_prompt"):
        text = getattr(settings, name)
        if text is not None and len(text) > limits.max_prompt_characters:
            problem = f"has {len(text)} characters; at most {limits.max_prompt_characters}"
            raise InvalidRequest(name, text, problem)


def in_the_clients_words(error: InvalidRequest, settings: GenerationSettings) -> ApiError:
    """A refused sampling setting by the name under which the client sent it."""
    told = client_error(error)
    sent = settings.model_dump()
    param = as_client_named(told.param or "", sent)
    message = told.message
    if param in ("size", "seconds"):
        message = f"{param}={sent[param]!r}: {message}"
    elif param != error.field and message.startswith(error.field):
        message = param + message.removeprefix(error.field)
    return ApiError(ClientError(told.status, message, param=param, code=told.code))
