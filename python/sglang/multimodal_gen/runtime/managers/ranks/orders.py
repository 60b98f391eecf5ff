"""An order under way, as the front sees it, and what its ends mean together."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang.multimodal_gen.runtime.managers.ranks.messages import End
from sglang.multimodal_gen.runtime.managers.ranks.watch import Watch
from sglang.multimodal_gen.runtime.utils.errors import DiffusionError, WorkerDied
from sglang.multimodal_gen.runtime.utils.progress import Preview, ProgressEvent


@dataclass(frozen=True, slots=True)
class Finished:
    """All ranks of an order have reported its end."""


Event = ProgressEvent | Preview | Finished | WorkerDied


@dataclass(slots=True, eq=False)
class OrderUnderWay:
    """An order that was given to some ranks; the first of them is its lead.

    ``events`` may be shared by several orders: whoever waits for them reads one queue.
    """

    id: int
    what: str
    ranks: tuple[int, ...]
    events: queue.Queue[tuple[OrderUnderWay, Event]]
    watch: Watch
    when_over: Callable[[], object] | None = None
    ends: dict[int, End] = field(default_factory=dict)
    failed_since: float | None = None

    @property
    def working(self) -> list[int]:
        """Ranks that have not reported the end."""
        return [rank for rank in self.ranks if rank not in self.ends]

    def end(self, rank: int, end: End) -> bool:
        """Take one rank's end; whether it was the last."""
        self.ends[rank] = end
        if end.error is not None and self.failed_since is None:
            self.failed_since = time.monotonic()
        return not self.working

    @property
    def is_split(self) -> bool:
        """Whether ranks that have ended do not stand at the same place: they cannot go on.

        One that follows another's failure stands where that one does.
        """
        errors = [end.error for end in self.ends.values()]
        kinds = {e.kind if e else None for e in errors if e is None or not e.follows}
        return len(kinds) > 1 or len({end.reports for end in self.ends.values()}) > 1

    def split(self) -> WorkerDied:
        """The error for an order that failed on some of its ranks, or at different places."""
        failed = {rank: end.error for rank, end in self.ends.items() if end.error is not None}
        names = " and ".join(f"rank {rank}" for rank in failed)
        others = "other ranks did not" if len(failed) < len(self.ranks) else "each at another place"
        told = [f"on rank {rank}:\n{error.traceback.rstrip()}" for rank, error in failed.items()]
        said = f"{names} failed during {self.what}, {others}. All ranks were ended."
        return WorkerDied("\n".join([said, *told]))

    def values(self) -> dict[int, Any]:
        """What the ranks returned.

        Raises:
            DiffusionError: what all of them raised, at the same place.
        """
        error = self.first_error()
        if error is not None:
            raise error
        return {rank: end.value for rank, end in self.ends.items()}

    def first_error(self) -> DiffusionError | None:
        """The error of the lowest rank that failed by itself; else of one that followed it."""
        failed = {rank: end.error for rank, end in sorted(self.ends.items()) if end.error}
        own = {rank: error for rank, error in failed.items() if not error.follows}
        for rank, error in (own or failed).items():
            return error.rebuilt(rank)
        return None
