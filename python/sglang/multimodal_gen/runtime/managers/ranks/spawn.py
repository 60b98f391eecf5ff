"""Starts ranks on this machine, and knows how each of them ended."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import IO

from sglang.multimodal_gen.runtime.managers.ranks.channel import Channel, channel_pair
from sglang.multimodal_gen.runtime.managers.ranks.messages import RankTask
from sglang.multimodal_gen.runtime.utils.environ import environment_with

_BOOT = """
import json, sys
told = json.loads(sys.stdin.readline())
sys.path[:] = told["path"]
from sglang.multimodal_gen.runtime.managers.ranks.rank_process import main
main(told["line"], told["crash"], told["tied"])
"""
_TAIL_BYTES = 6000
_LOGGERS = ("", "sglang")


@dataclass(slots=True)
class RankProcess:
    """A rank that this process started: the line to it, and what it leaves behind.

    A fresh interpreter, not a fork and not ``multiprocessing``'s spawn, which would run the
    caller's script again. It leads a session of its own, so that Ctrl-C reaches the front alone,
    and what it starts itself can be ended with it.
    """

    task: RankTask
    channel: Channel
    process: subprocess.Popen[str]
    output: IO[bytes] | None
    crash: IO[bytes] = field(repr=False)
    killed: bool = False
    _files: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def start(cls, task: RankTask, *, processors: int) -> RankProcess:
        """Start a rank and tell it its task. Rank 0's own prints go to our standard error."""
        channel, theirs = channel_pair(task.packages)
        crash = tempfile.TemporaryFile(prefix="rank-crash-")  # noqa: SIM115 - see close()
        output = None
        if task.rank != 0:
            output = tempfile.TemporaryFile(prefix="rank-output-")  # noqa: SIM115
        defaults = {"OMP_NUM_THREADS": str(processors)}
        if task.one_node and sys.platform == "linux":
            # All ranks are here: no need to find out which network the machine's name leads to.
            defaults["GLOO_SOCKET_IFNAME"] = "lo"
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT],
            stdin=subprocess.PIPE,
            stdout=_standard_error() if output is None else output,
            stderr=_standard_error() if output is None else output,
            pass_fds=(theirs.fileno(), crash.fileno()),
            env=environment_with(defaults),
            start_new_session=True,
            text=True,
        )
        told = {
            "path": [os.path.abspath(place) for place in sys.path],
            "line": theirs.fileno(),
            "crash": crash.fileno(),
            "tied": threading.current_thread() is threading.main_thread(),
        }
        theirs.close()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already: its end tells more
            process.stdin.write(json.dumps(told) + "\n")
            process.stdin.close()
        with contextlib.suppress(OSError):
            channel.send(task)
        return cls(task, channel, process, output, crash)

    def kill(self) -> None:
        """End the process and what it started, at once; once, since its number may be reused."""
        if self.killed:
            return
        self.killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ended(self, seconds: float) -> str:
        """How the process ended, in words; waits for that, but not for long."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "closed its line without ending"
        if code < 0:
            name = signal.Signals(-code).name
            return f"died of {name} (exit code {code})"
        return f"ended with exit code {code}"

    def ask_for_stack(self) -> None:
        """Have the process write the stacks of its threads, which works while it is stuck."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)

    def last_words(self) -> str:
        """The end of what it wrote: its output, unless we saw that, and the stacks of a crash."""
        with self._files:  # whoever ends the run may let go of them meanwhile
            given = (file for file in (self.output, self.crash) if file is not None)
            parts = [_tail(file) for file in given if not file.closed]
        return "\n".join(part for part in parts if part)

    def close(self) -> None:
        """Let go of the files; the line is closed by who reads it."""
        with self._files:
            for file in (self.output, self.crash):
                if file is not None:
                    file.close()


def log_levels() -> dict[str, int]:
    """This process's log levels, for ranks to log as much."""
    return {name: logging.getLogger(name).getEffectiveLevel() for name in _LOGGERS}


def processors_each(ranks: int) -> int:
    """Threads for each of some ranks that compute on this machine's processors."""
    return max(1, len(os.sched_getaffinity(0)) // ranks) if hasattr(os, "sched_getaffinity") else 1


def end_all(processes: list[RankProcess], patience: float) -> None:
    """Wait for ranks that were told to stop, kill those that did not, and let go of them."""
    deadline = time.monotonic() + patience
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()
        process.close()


def _standard_error() -> int:
    """Our standard error, or nowhere if it is closed."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


def _tail(file: IO[bytes]) -> str:
    size = os.fstat(file.fileno()).st_size
    data = os.pread(file.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    return data.decode(errors="replace").strip()
