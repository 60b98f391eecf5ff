"""ASGI middleware: an id for each request, and one line when it is over."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang.multimodal_gen.runtime.managers.visit import Visit, visiting
from sglang.multimodal_gen.runtime.server_args.guard_section import RequestLog

logger = logging.getLogger("sglang.requests")

_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
ERROR_CODE_HEADER = "x-error-code"
WAITING_LINES = 10_000
"""Lines that wait for a slow reader of standard error; more are dropped, and counted."""
END_SECONDS = 1.0
"""How long a server that ends waits for the reader."""


@dataclass(slots=True)
class Answered:
    """A request that is over: what was asked, and how it went. ``route`` is the pattern's."""

    request_id: str
    method: str
    route: str
    status: int
    seconds: float
    error_code: str | None
    facts: dict[str, Any] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        """The log line's names and values: never a body, a header, or a query."""
        known = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": self.request_id,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "seconds": round(self.seconds, 4),
        }
        if self.error_code is not None:
            known["error"] = self.error_code
        return known | self.facts


Heard = Callable[[Answered], object]


class RequestLogger:
    """Accepts the client's ``x-request-id`` if it is short and plain, makes one otherwise, returns
    it, and tells each of ``heard`` when the last byte is sent.
    """

    def __init__(self, app: ASGIApp, heard: tuple[Heard, ...]) -> None:
        self.app = app
        self.heard = heard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and watch its answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if _SANE_ID.fullmatch(asked) else secrets.token_hex(16)
        start, status, code = time.perf_counter(), 499, None  # 499: the client went first

        async def watched(message: Any) -> None:
            nonlocal status, code
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                status, code = message["status"], headers.get(ERROR_CODE_HEADER)
            await send(message)

        visit = Visit(request_id=request_id)
        try:
            with visiting(visit):
                await self.app(scope, receive, watched)
        finally:
            seconds = time.perf_counter() - start
            route = route_of(scope)
            done = Answered(request_id, scope["method"], route, status, seconds, code, visit.facts)
            for tell in self.heard:
                tell(done)


def route_of(scope: Scope) -> str:
    """The pattern of the route that answered: few different ones, and no client's words."""
    route = scope.get("route")
    return getattr(route, "path", None) or "(none)"


def write_line(done: Answered) -> None:
    """Log a request that is over."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("", extra={"line": done.line()})


def start_request_log(form: RequestLog) -> None:
    """Send the lines to standard error in a form of their own, whatever the other logs' is."""
    logger.propagate = False
    logger.handlers.clear()
    if form == "off":
        logger.setLevel(logging.CRITICAL)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines(as_json=form == "json"))
    logger.addHandler(Unhurried(handler))
    logger.setLevel(logging.INFO)


class Unhurried(logging.Handler):
    """Writes through another handler, in a thread, so that no caller ever waits for a reader.

    The event loop calls it: a pipe that nobody reads would stop the whole server once it is full.
    What does not fit among ``waiting`` lines is dropped; the next line that is written says how
    many (``dropped``).
    """

    def __init__(self, target: logging.Handler, waiting: int = WAITING_LINES) -> None:
        super().__init__()
        self._target = target
        self._lines: queue.Queue[logging.LogRecord] = queue.Queue(waiting)
        self._dropped = 0
        threading.Thread(target=self._write, name="request log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a line over; never waits. Calls are one at a time (`logging.Handler.handle`)."""
        if self._dropped:
            line: dict[str, Any] = record.line  # type: ignore[attr-defined]
            record.line = {**line, "dropped": self._dropped}
        try:
            self._lines.put_nowait(record)
        except queue.Full:
            self._dropped += 1
        else:
            self._dropped = 0

    def _write(self) -> None:
        while True:
            self._target.handle(self._lines.get())
            self._lines.task_done()

    def drain(self, seconds: float) -> bool:
        """Wait for what is handed over to be written, so long at most; whether it is."""
        deadline = time.monotonic() + seconds
        while self._lines.unfinished_tasks:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True


@contextlib.contextmanager
def requests_logged(form: RequestLog) -> Iterator[None]:
    """`start_request_log`; at the end, what is left is written as far as somebody reads it."""
    start_request_log(form)
    try:
        yield
    finally:
        for handler in logger.handlers:
            if isinstance(handler, Unhurried):
                handler.drain(END_SECONDS)


class _Lines(logging.Formatter):
    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """One line; values are plain, so that nobody can forge a second one."""
        line: dict[str, Any] = record.line  # type: ignore[attr-defined]
        if self._as_json:
            return json.dumps(line)
        return " ".join(f"{name}={value}" for name, value in line.items())
