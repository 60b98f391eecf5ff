"""Runs the application: the model is loaded, requests are served, and then a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from sglang.multimodal_gen.runtime.entrypoints.http.app import create_app
from sglang.multimodal_gen.runtime.entrypoints.http.context import Context, webhook_policy
from sglang.multimodal_gen.runtime.entrypoints.http.listening import address_of
from sglang.multimodal_gen.runtime.entrypoints.http.opening import open_service
from sglang.multimodal_gen.runtime.entrypoints.http.request_log import requests_logged
from sglang.multimodal_gen.runtime.entrypoints.http.tracing import Tracing, open_tracing
from sglang.multimodal_gen.runtime.managers.lifecycle import Lifecycle
from sglang.multimodal_gen.runtime.managers.storage.opening import (
    Storage,
    open_storage,
    quiet_clean_up,
)
from sglang.multimodal_gen.runtime.managers.webhooks import (
    RetryRule,
    WebhookSender,
    secret_bytes,
)
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.serving import HttpArgs, ServingArgs
from sglang.multimodal_gen.runtime.utils.environ import WEBHOOK_SECRET
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

logger = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 5  # for replies that are being written when the work has ended
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(
    server_args: ServerArgs,
    serving: ServingArgs,
    listener: socket.socket,
    *,
    tell: Callable[[str], object] = logger.info,
) -> int:
    """Serve on a listening socket until told to stop; returns the exit code.

    ``tell`` gets a sentence when the server listens, when it is ready, and when it stopped.

    Raises:
        UserError: the model cannot be served.
        CheckpointError: the model's files are incomplete or damaged.
    """
    address = address_of(listener)
    with (
        contextlib.closing(listener),
        open_storage(serving) as storage,
        _tracing(serving) as tracing,
        requests_logged(serving.seeing.request_log),
    ):
        webhooks = webhook_sender(serving, storage)
        quiet_clean_up(storage)
        lifecycle = Lifecycle(
            lambda progress: open_service(server_args, serving, storage, progress),
            on_ready=lambda name: tell(f"ready: {name!r} is served at {address}"),
            on_failure=lambda: server.fail(),
        )
        context = Context(lifecycle, serving, storage.files, webhooks, tracing=tracing)
        server = Server(create_app(context), lifecycle, serving.http)
        tell(f"listening on {address}; the model is loading")
        lifecycle.start()
        if webhooks is not None:
            webhooks.start()
        server.run(sockets=[listener])
        in_time = lifecycle.finish(serving.http.http_graceful_shutdown_timeout)
        if webhooks is not None:
            webhooks.close()
    if lifecycle.error is not None:
        raise lifecycle.error
    if lifecycle.phase == "failed":
        return 1
    tell("stopped" if in_time else "stopped; work that took too long was given up")
    return 0


@contextlib.contextmanager
def _tracing(serving: ServingArgs) -> Iterator[Tracing | None]:
    tracing = open_tracing(serving.seeing.otlp_traces_endpoint)
    try:
        yield tracing
    finally:
        if tracing is not None:
            tracing.close()


def webhook_sender(serving: ServingArgs, storage: Storage) -> WebhookSender | None:
    """Who sends webhooks; None where there is nothing to sign them with.

    Raises:
        InvalidArgument: the secret is none.
    """
    secret = serving.store.webhook_secret or WEBHOOK_SECRET.read()
    if not secret:
        return None
    try:
        secret_bytes(secret)
    except ValueError as error:
        raise InvalidArgument("webhook_secret", "(not shown)", str(error)) from error
    return WebhookSender(
        storage.database,
        secret,
        policy=webhook_policy(serving),
        rule=RetryRule(attempts=serving.store.webhook_attempts),
    )


class Server(uvicorn.Server):
    """Uvicorn, stopping in our order: no new work, running work ends, then connections close."""

    def __init__(self, app: object, lifecycle: Lifecycle, http: HttpArgs) -> None:
        self.lifecycle = lifecycle
        self.grace_seconds = http.http_graceful_shutdown_timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        config = uvicorn.Config(
            app,  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=int(self.grace_seconds) + _LAST_WORDS_SECONDS,
        )
        super().__init__(config)

    def fail(self) -> None:
        """The model cannot be served: stop. Any thread may call this."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A first SIGINT or SIGTERM stops in order, a second at once; neither is raised again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Only sets a flag and hands over: the interrupted code may hold the scheduler's lock.
        if self._stopping:
            self.force_exit = self.should_exit = True
        elif self._loop is None:
            self.should_exit = True
        else:
            self._stopping = True
            self._loop.call_soon_threadsafe(self._begin_stop)

    def _begin_stop(self) -> None:
        self._stop_task = asyncio.ensure_future(self._stop())

    async def _stop(self) -> None:
        self.lifecycle.stop_taking()
        service = self.lifecycle.opened
        if service is not None:
            wait = service.scheduler.wait_until_idle
            await asyncio.to_thread(wait, self.grace_seconds)
            service.scheduler.abandon()
        self.should_exit = True
