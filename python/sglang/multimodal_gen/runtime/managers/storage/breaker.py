"""What keeps many from waiting, one after the other, for what has just not answered."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from sglang.multimodal_gen.runtime.utils.errors import StoreUnavailable


class Breaker:
    """After a failure, refuses at once for ``rest_seconds``; then one tries again, and the others
    are refused until that has worked.
    """

    def __init__(self, rest_seconds: float, clock: Callable[[], float]) -> None:
        self.rest_seconds = rest_seconds
        self.clock = clock
        self._until: float | None = None
        self._trying = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def attempt(self) -> Iterator[bool]:
        """Around an attempt and its wait for a turn; whether it is the one that tries again.

        Raises:
            StoreUnavailable: it failed a moment ago, or one that tries again is at it.
        """
        tries = self._admit()
        try:
            yield tries
        finally:
            if tries:
                with self._lock:
                    self._trying = False

    def check(self) -> None:
        """For the others, when their turn has come: raises if the one before failed."""
        with self._lock:
            if self._until is not None:
                self._refuse()

    def failed(self) -> None:
        """It did not answer."""
        with self._lock:
            self._until = self.clock() + self.rest_seconds

    def worked(self) -> None:
        """It answered."""
        with self._lock:
            self._until = None

    def _admit(self) -> bool:
        """Whether this one is the one that tries again."""
        with self._lock:
            if self._until is None:
                return False
            if self._trying or self.clock() < self._until:
                self._refuse()
            self._trying = True
            return True

    def _refuse(self) -> None:
        raise StoreUnavailable(
            "the job store did not answer a moment ago", retry_after=self.rest_seconds
        )
