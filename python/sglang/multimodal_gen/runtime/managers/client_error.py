"""What a client may know of an error: its own mistakes in full, ours without their insides.

One table for every door: the status and the words of each error of `utils.errors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.multimodal_gen.runtime.utils.errors import (
    Cancelled,
    CheckpointError,
    DeadlineExceeded,
    DiffusionError,
    FailedBefore,
    InputLost,
    InvalidRequest,
    KeyReused,
    NonFiniteOutput,
    OutOfMemory,
    OutputError,
    QueueFull,
    RateLimited,
    Unavailable,
    UserError,
    WorkerDied,
)

PATH_SETTINGS = frozenset({"image_path", "video_path", "mask_path"})
"""Sampling fields that hold paths of this machine: a door fills them, no client reads or sets
them."""


@dataclass(frozen=True, slots=True)
class ClientError:
    """An error as OpenAI's API words it, with its HTTP status.

    ``retry_after`` is in seconds; ``retry`` False asks clients not to try the same again.
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None
    retry: bool = True

    def as_object(self) -> dict[str, Any]:
        """The inside of ``{"error": ...}``."""
        return {
            "message": _writable(self.message),
            "type": self.type,
            "param": None if self.param is None else _writable(self.param),
            "code": self.code,
        }


_STATUS_OF = {
    "invalid_value": 400,
    "out_of_memory": 400,
    "bad_file": 400,
    "cancelled": 409,
    "unavailable": 503,
    "deadline_exceeded": 504,
    "storage_full": 507,
}
"""The status of an error that only a record tells of; 500 where it is none of these."""

_Answer = Callable[[DiffusionError], ClientError]


def client_error(error: DiffusionError) -> ClientError:
    """How an error is told."""
    if isinstance(error, InvalidRequest):
        return _invalid_request(error)
    if isinstance(error, FailedBefore):
        told = error.told
        return ClientError(
            _STATUS_OF.get(str(told.get("code")), 500),
            str(told.get("message")),
            str(told.get("type")),
            told.get("param"),
            told.get("code"),
            retry=False,
        )
    if isinstance(error, Unavailable):
        seconds = max(1, math.ceil(error.retry_after))
        if isinstance(error, QueueFull):
            return ClientError(429, str(error), "rate_limit_error", None, "queue_full", seconds)
        if isinstance(error, RateLimited):
            code = "rate_limit_exceeded"
            return ClientError(429, str(error), "rate_limit_error", None, code, seconds)
        return ClientError(503, str(error), "server_error", None, "unavailable", seconds)
    for kind, answer in _ANSWERS:
        if isinstance(error, kind):
            return answer(error)
    message = "the server failed to make this; its log says why"
    return ClientError(500, message, "server_error", None, "internal_error", retry=False)


def _invalid_request(error: InvalidRequest) -> ClientError:
    name, message = error.field, str(error)
    if name in PATH_SETTINGS:
        name = name.removesuffix("_path")
        message = f"{name}: {error.problem}"
    return ClientError(400, message, param=name, code="invalid_value")


def _server_error(status: int, code: str, message: str | None = None) -> _Answer:
    return lambda error: ClientError(
        status, message or str(error), "server_error", None, code, retry=False
    )


def _clients_fault(code: str, message: str | None = None) -> _Answer:
    return lambda error: ClientError(400, message or str(error), code=code)


_NO_SPACE = (
    "the result could not be stored; the log says why. Pictures can be had with "
    "response_format=b64_json"
)
_ANSWERS: tuple[tuple[type[DiffusionError], _Answer], ...] = (
    (OutOfMemory, _clients_fault("out_of_memory")),
    (OutputError, _server_error(507, "storage_full", _NO_SPACE)),
    (
        KeyReused,
        lambda error: ClientError(
            422, str(error), param="Idempotency-Key", code="idempotency_key_reused", retry=False
        ),
    ),
    (UserError, _clients_fault("invalid_value")),
    (CheckpointError, _clients_fault("bad_file", "the file is damaged, or for another model")),
    (
        Cancelled,
        lambda _: ClientError(409, "the request was cancelled", code="cancelled", retry=False),
    ),
    (DeadlineExceeded, _server_error(504, "deadline_exceeded")),
    (InputLost, _server_error(500, "input_lost")),
    (NonFiniteOutput, _server_error(500, "non_finite_output", "the model made NaN or infinity")),
    (WorkerDied, _server_error(500, "worker_died", "the process that made this died")),
)
"""First match counts; what is not named here is told without its words."""


def _writable(text: str) -> str:
    """Text that UTF-8 can carry: halves of surrogate pairs are written out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
