"""What a run's processes say to each other."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from sglang.multimodal_gen.runtime.distributed.layout import ParallelLayout
from sglang.multimodal_gen.runtime.distributed.process_group import StoreAddress
from sglang.multimodal_gen.runtime.managers.ranks.wire import DoesNotTravel, name_of, write
from sglang.multimodal_gen.runtime.utils.errors import DiffusionError, FollowsFailure, InternalError
from sglang.multimodal_gen.runtime.utils.progress import Preview, ProgressEvent


@dataclass(frozen=True, slots=True)
class FrontAddress:
    """Where the front listens for ranks of other machines, and the secret that lets them in."""

    host: str
    port: int
    secret: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """All that a process needs to become a rank.

    ``model`` is a packed `ModelDescription`: external packages must be loaded before it is read.
    ``packages`` are those of which a message may name classes and functions.
    Without ``store`` the ranks meet at one that is handed over apart. Without ``front`` orders come
    over the line that brought this.
    """

    rank: int
    local_rank: int
    node: int
    layout: ParallelLayout
    one_node: bool
    device: str
    store: StoreAddress | None
    model: bytes
    packages: frozenset[str]
    log_levels: dict[str, int]
    front: FrontAddress | None = None


# From the front to ranks.


@dataclass(frozen=True, slots=True)
class Order:
    """Work for ranks; each reports its `End`. ``verb`` is ``load``, ``run``, ``call`` or
    ``on_adapters``.

    ``arguments`` are packed: what a rank cannot read is that order's failure.
    """

    id: int
    verb: str
    arguments: bytes


@dataclass(frozen=True, slots=True)
class CancelOrder:
    """The caller wants an order to stop; to its lead, who agrees with the others when."""

    id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The run is over. To other nodes, ``failure`` says why it ended badly."""

    failure: str | None = None


# From ranks to the front.


@dataclass(frozen=True, slots=True)
class Hello:
    """First words of a rank, or of a node's command (``rank`` is None), that comes over a network.

    ``arguments`` are the resolved server arguments, which must be the same everywhere; None if
    another has told them.
    """

    rank: int | None
    node: int
    arguments: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Progress:
    """An event of an order, or a look at one of its images, from its lead."""

    order: int
    event: ProgressEvent | Preview


@dataclass(frozen=True, slots=True)
class LogLine:
    """A log record of rank 0, formatted as far as its values are needed for."""

    name: str
    level: int
    text: str
    path: str
    line: int


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life during an order, about once a second.

    ``idle_seconds`` is how long the process has used no processor; ``waiting`` says whether it
    waits for other ranks; ``stack`` is what it is doing, told only when it has been idle.
    """

    order: int
    idle_seconds: float
    waiting: bool
    stack: str


@dataclass(frozen=True, slots=True)
class SentError:
    """An error on its way to another process, as its class's name and what it is made of."""

    kind: str
    args: tuple[Any, ...]
    attributes: dict[str, Any]
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> SentError:
        """Pack an error; one that is not this package's arrives as `InternalError`."""
        text = "".join(traceback.format_exception(error))
        if not isinstance(error, DiffusionError) or not _travels(type(error)):
            said = f"{type(error).__name__}: {error}"
            return cls(name_of(InternalError), (said,), {}, text)
        kept = {name: value for name, value in vars(error).items() if _travels(value)}
        args = error.args if _travels(error.args) else (str(error),)
        return cls(name_of(type(error)), args, kept, text)

    @property
    def follows(self) -> bool:
        """Whether that rank only learned of another's failure."""
        return self.kind == name_of(FollowsFailure)

    def rebuilt(self, rank: int) -> DiffusionError:
        """The error as it was raised; its cause is the other process's traceback.

        Of a class that this process has not imported it is an `InternalError`.
        """
        # Not through __init__: a subclass may take other arguments than the message it made.
        kind = _loaded_error(self.kind)
        error = kind.__new__(kind)
        error.args = self.args
        vars(error).update(self.attributes)
        error.__cause__ = RankTraceback(f"on rank {rank}:\n{self.traceback}")
        return error


class RankTraceback(Exception):
    """The traceback of another process, as text."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of an order on one rank. ``reports`` counts the places where ranks agreed."""

    order: int
    value: Any = None
    error: SentError | None = None
    reports: int = 0


@dataclass(frozen=True, slots=True)
class RankLeft:
    """From another node's command: one of its ranks is gone."""

    rank: int
    how: str
    output: str


def _travels(value: object) -> bool:
    try:
        write(value)
    except DoesNotTravel:
        return False
    return True


def _loaded_error(name: str) -> type[DiffusionError]:
    """The error class of that name, among those that this process has imported."""
    waiting: list[type[DiffusionError]] = [DiffusionError]
    while waiting:
        cls = waiting.pop()
        if f"{cls.__module__}:{cls.__qualname__}" == name:
            return cls
        waiting += cls.__subclasses__()
    return InternalError
