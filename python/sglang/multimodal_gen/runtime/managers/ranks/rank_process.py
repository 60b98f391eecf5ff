"""A process that is one rank: its streams, its logs, and its end when its starter ends."""

from __future__ import annotations

import ctypes
import faulthandler
import io
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from sglang.multimodal_gen.runtime.managers.ranks.channel import Channel
from sglang.multimodal_gen.runtime.managers.ranks.meeting import meet_front
from sglang.multimodal_gen.runtime.managers.ranks.messages import Hello, LogLine, RankTask, Stop
from sglang.multimodal_gen.runtime.managers.ranks.rank_loop import RankLoop

ORPHANED = 71
"""Exit code of a rank whose front is gone."""
_PR_SET_PDEATHSIG = 1


def main(descriptor: int, crash_descriptor: int, tied_to_parent: bool) -> NoReturn:
    """Be the rank that the first message on ``descriptor`` describes, until told to stop.

    Args:
        descriptor: this end of the line to whoever started the process.
        crash_descriptor: a file for the stacks of a crash, or of a rank that is asked for them.
        tied_to_parent: end at once when the parent does. Only where its main thread started this
            process: Linux ties a child to the thread.
    """
    if tied_to_parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable(crash_descriptor)
    faulthandler.register(signal.SIGUSR1, crash_descriptor)
    starter = Channel(socket.socket(fileno=descriptor))
    task: RankTask = starter.receive()
    channel = starter
    if task.front is not None:
        channel = meet_front(task.front, Hello(task.rank, task.node, None))
        threading.Thread(target=_end_with, args=(starter,), daemon=True).start()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file or pipe would be written to in blocks, and a rank that is ended flushes none.
        sys.stdout.reconfigure(line_buffering=True)
    _send_logs(task, channel.send)
    RankLoop(task, channel, _leave).run()
    # Not the long way: with the others gone, libraries' own farewells can wait for them forever.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_with(starter: Channel) -> None:
    """End this process when whoever started it is gone, whatever it is doing."""
    try:
        starter.receive()
    except (EOFError, OSError):
        _leave(None)


def _leave(stop: Stop | None) -> NoReturn:
    os._exit(ORPHANED if stop is None else 0)


def _send_logs(task: RankTask, send: Callable[[LogLine], None]) -> None:
    """Rank 0's records go to the front's own handlers; the others' wait in a file for a failure."""
    handler: logging.Handler = _ToFront(send) if task.rank == 0 else logging.StreamHandler()
    logging.basicConfig(format="%(message)s", handlers=[handler], force=True)
    for name, level in task.log_levels.items():
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(True)


class _ToFront(logging.Handler):
    def __init__(self, send: Callable[[LogLine], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)  # with the traceback, which does not travel
        try:
            self._send(LogLine(record.name, record.levelno, text, record.pathname, record.lineno))
        except OSError:
            self.handleError(record)
