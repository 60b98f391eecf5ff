"""Which copies of the model are free."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

_CHECK_SECONDS = 0.25


class Replicas:
    """Copies of the model, each taken by one batch at a time; for several threads.

    Args:
        ranks: the ranks of each copy.
        check: raises when there is nothing to wait for any more.
    """

    def __init__(self, ranks: Sequence[tuple[int, ...]], check: Callable[[], object]) -> None:
        self.ranks = tuple(ranks)
        self._check = check
        self._free = set(range(len(self.ranks)))
        self._changed = threading.Condition()
        self._taking_all = threading.Lock()

    def take(self, seconds: float) -> int | None:
        """A free copy, taken; None if none is free within some seconds."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._free:
                self._check()
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(min(left, _CHECK_SECONDS))
            replica = min(self._free)
            self._free.discard(replica)
            return replica

    def free(self, replica: int) -> None:
        """Give a copy back."""
        with self._changed:
            self._free.add(replica)
            self._changed.notify_all()

    @contextmanager
    def all(self) -> Iterator[None]:
        """Hold all copies inside the block, from when the last batch has finished."""
        taken: list[int] = []
        try:
            with self._taking_all:  # two at once would wait for each other
                while len(taken) < len(self.ranks):
                    replica = self.take(_CHECK_SECONDS)
                    if replica is not None:
                        taken.append(replica)
            yield
        finally:
            for replica in taken:
                self.free(replica)
