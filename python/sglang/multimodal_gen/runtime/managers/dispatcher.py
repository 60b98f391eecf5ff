"""The thread that runs batches."""

from __future__ import annotations

import threading

from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler

_LOOK_AROUND_SECONDS = 0.25  # deadlines of waiting requests are seen at least this often


class Dispatcher:
    """Calls `Scheduler.run_next` for as long as it is wanted."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="batches", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread is there."""
        return self._thread.is_alive()

    def stop(self, grace_seconds: float) -> bool:
        """Let the running batch finish, hand the rest back; whether all was done in time.

        What runs after ``grace_seconds`` is stopped within a step; then a last short wait.
        """
        self.scheduler.hand_back()
        in_time = self.scheduler.wait_until_idle(grace_seconds)
        self.scheduler.abandon()
        self._stop.set()
        self._thread.join(timeout=5.0 if in_time else max(5.0, grace_seconds))
        return in_time

    def _loop(self) -> None:
        while not self._stop.is_set():
            if not self.scheduler.run_next():
                self.scheduler.wait_for_work(_LOOK_AROUND_SECONDS)
