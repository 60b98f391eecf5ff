"""A server for one test: a process of its own, which goes with it."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx

from sglang.multimodal_gen.runtime.utils.errors import UserError

_MAIN = "sglang.multimodal_gen.runtime.entrypoints.cli.main"
_LISTENING = re.compile(r"listening on (http://\S+?);")
_END_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class OwnServer:
    """Where it is, and which process it is."""

    url: str
    pid: int


@contextlib.contextmanager
def own_server(
    flags: Sequence[str],
    *,
    start_seconds: float = 1800.0,
    tell: Callable[[str], object] = lambda sentence: None,
) -> Iterator[OwnServer]:
    """``sglang serve`` with these flags on a free port, ready.

    Raises:
        UserError: it ended before it was ready; the end of what it said is in the message.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", _MAIN, "serve", *flags, "--port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )

        def said() -> str:
            log.seek(0)
            return log.read().decode("utf-8", "replace")

        try:
            tell("starting a server")
            url = _address(process, said, time.monotonic() + start_seconds)
            tell(f"started {url}; waiting until it is ready")
            _until_ready(process, said, url, time.monotonic() + start_seconds)
            yield OwnServer(url, process.pid)
        finally:
            _end(process)


def _address(process: subprocess.Popen[bytes], said: Callable[[], str], deadline: float) -> str:
    while time.monotonic() < deadline:
        match = _LISTENING.search(said())
        if match:
            return match[1]
        _still_there(process, said)
        time.sleep(0.05)
    raise UserError("the server did not say where it listens")


def _until_ready(
    process: subprocess.Popen[bytes], said: Callable[[], str], url: str, deadline: float
) -> None:
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=10).status_code == 200:
                return
        _still_there(process, said)
        time.sleep(0.1)
    raise UserError("the server did not become ready in time")


def _still_there(process: subprocess.Popen[bytes], said: Callable[[], str]) -> None:
    if process.poll() is not None:
        last = " ".join(said().split())[-400:]
        raise UserError(f"the server ended with exit code {process.returncode}: {last}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
