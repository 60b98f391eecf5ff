"""The error tree: who caused it decides how it is told.

::

    DiffusionError                 everything this package raises on purpose
    ├── UserError (ValueError)     the caller can mend it: exit code 2, HTTP 4xx
    │   ├── InvalidRequest         a sampling value is wrong; names field, value, remedy
    │   ├── InvalidArgument        a server argument (flag) is wrong
    │   ├── ModelNotFound          a model path or name leads nowhere
    │   ├── OutOfMemory            the request does not fit into the device
    │   ├── OutputError            the output folder cannot be written
    │   └── KeyReused              an idempotency key came with another request: HTTP 422
    ├── CheckpointError (ValueError)  a checkpoint is incomplete, damaged or of another shape
    ├── PipelineDefinitionError (TypeError)  a porter's pipeline, stage or registration is wrong
    ├── Cancelled                  the caller asked to stop; not a failure
    ├── DeadlineExceeded           the request's own time limit passed: HTTP 504
    ├── FailedBefore               a job's failure as its record tells it
    ├── InputLost                  what was uploaded for a job is not there when it goes on
    ├── Unavailable                not now, perhaps later: HTTP 503
    │   ├── QueueFull              too much waits already: HTTP 429
    │   ├── StoreUnavailable       the jobs' database does not answer
    │   └── RateLimited            a client's budget is used up for now: HTTP 429
    ├── CallbackFailed             the caller's progress callback raised; its error is the cause
    └── InternalError              our fault: exit code 1, HTTP 5xx
        ├── NonFiniteOutput        a component produced NaN or infinity
        └── WorkerDied             what ran the batch is gone

A message names the value, the field and the remedy. Entry points print user and checkpoint
errors as one paragraph without a traceback; everything else is a bug and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class DiffusionError(Exception):
    """Root of every error that this package raises on purpose."""


class UserError(DiffusionError, ValueError):
    """A value that the caller gave, and can mend."""


class InvalidRequest(UserError):
    """A sampling value that the model cannot serve."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        self.field = field
        self.value = value
        self.problem = problem
        super().__init__(f"{field}={_shown(value)}: {problem}")


class InvalidArgument(UserError):
    """A server argument that cannot be honoured."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        self.field = field
        self.value = value
        super().__init__(f"{field}={_shown(value)}: {problem}")


class ModelNotFound(UserError):
    """A model path or name that leads to no checkpoint or no known family."""


class OutOfMemory(UserError):
    """A request that does not fit into the device's memory; the next one may."""


class OutputError(UserError):
    """A result that cannot be written where the caller asked."""


class CheckpointError(DiffusionError, ValueError):
    """A checkpoint that is incomplete, damaged, or made for another architecture."""


class PipelineDefinitionError(DiffusionError, TypeError):
    """A pipeline, stage, model or registration that breaks the porters' contract."""


class Cancelled(DiffusionError):
    """Work stopped because the caller asked for it."""


class DeadlineExceeded(DiffusionError):
    """The time that a request set for itself passed before it was done."""


class FailedBefore(DiffusionError):
    """A job that failed earlier, or on another server: what its record says of it."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.told = told
        super().__init__(str(told.get("message")))


class InputLost(DiffusionError):
    """An input that was uploaded for a job, and is not there any more when the job goes on."""


class Unavailable(DiffusionError):
    """The server cannot take this now; ``retry_after`` is when to ask again, in seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class QueueFull(Unavailable):
    """As much waits as the operator allows."""


class StoreUnavailable(Unavailable):
    """The database of the jobs cannot be read or written now."""


class KeyReused(UserError):
    """An idempotency key that came before with another request: HTTP 422."""


class RateLimited(Unavailable):
    """A client has asked for as much as it may in this minute."""


class CallbackFailed(DiffusionError):
    """The caller's own callback raised; its error, ``cause``, goes back to the caller as it is."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause
        super().__init__(f"the progress callback raised {cause!r}")


class InternalError(DiffusionError, RuntimeError):
    """A fault of this runtime, not of its caller."""


class NonFiniteOutput(InternalError):
    """A component produced NaN or infinity: a picture of it would be black without any sign."""


class FollowsFailure(InternalError):
    """Another rank failed, and said so at the place where all look; its own error says why."""


class WorkerDied(InternalError):
    """What ran the batch is gone, and the batch with it; a runner raises it."""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
