"""Signs of life: a thread of each rank tells the front whether its work goes on."""

from __future__ import annotations

import linecache
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from sglang.multimodal_gen.runtime.managers.ranks.messages import Beat

BEAT_SECONDS = 1.0
IDLE_SHARE = 0.1
"""A process that uses less of a processor than this is idle.

Its background threads (this one, gloo's, torch's watchdogs) used 0.02 to 0.045 of a slow virtual
processor in a rank that slept; one that computes, or waits for its GPU, uses a whole one.
"""
TOLD_AFTER_SECONDS = 2.0
"""Idle for as long, a rank's stack goes with its beat."""
_COLLECTIVES = ("/torch/distributed/", "/runtime/distributed/group.py")
_INNERMOST = 6


class Heartbeat:
    """Beats while an order runs on the thread that made this."""

    def __init__(self, send: Callable[[Beat], None]) -> None:
        self._send = send
        self._worker = threading.get_ident()
        self._running = threading.Event()
        self._order = 0
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    @contextmanager
    def during(self, order: int) -> Iterator[None]:
        """Beat inside the block."""
        self._order = order
        self._running.set()
        try:
            yield
        finally:
            self._running.clear()

    def _beat(self) -> None:
        order, idle = 0, IdleClock()
        while True:
            self._running.wait()
            if order != self._order:
                order, idle = self._order, IdleClock()
            time.sleep(BEAT_SECONDS)
            if not self._running.is_set() or order != self._order:
                continue
            frame = sys._current_frames().get(self._worker)
            seconds = idle.seconds()
            told = seconds >= TOLD_AFTER_SECONDS and frame is not None
            stack = "".join(traceback.format_stack(frame)) if told else ""
            try:
                self._send(Beat(order, seconds, waits_for_ranks(frame), stack))
            except OSError:
                return  # the front is gone; who listens to it ends this process


class IdleClock:
    """How long this process has used (nearly) no processor."""

    def __init__(
        self,
        wall: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.process_time,
    ) -> None:
        self._wall, self._processor = wall, processor
        self._before = (wall(), processor())
        self._idle = 0.0

    def seconds(self) -> float:
        """Seconds idle up to now, counted in whole spans between calls."""
        now = (self._wall(), self._processor())
        span, used = now[0] - self._before[0], now[1] - self._before[1]
        self._before = now
        self._idle = self._idle + span if used < IDLE_SHARE * span else 0.0
        return self._idle


def waits_for_ranks(frame: FrameType | None) -> bool:
    """Whether a stack's end is a collective, or a wait for one that was started."""
    if frame is not None:
        # A handle's wait() is C: it shows as the line of whoever called it.
        # A frame that is between two lines has none.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)
        if ".wait(" in line:
            return True
    for _ in range(_INNERMOST):
        if frame is None:
            return False
        path = frame.f_code.co_filename.replace("\\", "/")
        if any(part in path for part in _COLLECTIVES):
            return True
        frame = frame.f_back
    return False
