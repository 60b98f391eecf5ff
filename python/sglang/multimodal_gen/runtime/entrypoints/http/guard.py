"""ASGI middleware at the door: who asks, whether they may, and how much is left to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang.multimodal_gen.runtime.entrypoints.http.budgets import Budgets
from sglang.multimodal_gen.runtime.entrypoints.http.errors import answer
from sglang.multimodal_gen.runtime.entrypoints.http.keys import Identity, KeyRing
from sglang.multimodal_gen.runtime.managers.client_error import ClientError, client_error
from sglang.multimodal_gen.runtime.managers.visit import Visit, current_visit, visiting
from sglang.multimodal_gen.runtime.server_args.guard_section import GuardArgs
from sglang.multimodal_gen.runtime.utils.errors import RateLimited

OPEN_PATHS = frozenset({"/", "/liveness", "/health"})
"""The page, and what tells only whether the server is up: without key, and nothing is counted."""
OPEN_PREFIXES: tuple[str, ...] = ("/page/",)
"""Where files lie that are the same for everybody, such as a page that asks for the key itself."""
_ADMIN = frozenset({("POST", "/v1/loras"), ("DELETE", "/v1/loras")})


class Guard:
    """Refuses who shows no key before anything else is looked at, even whether a route exists."""

    def __init__(self, app: ASGIApp, guard: GuardArgs) -> None:
        self.app = app
        self.keys = KeyRing(guard)
        self.budgets = Budgets(guard)
        self.metrics_without_key = guard.metrics_without_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on as a visit of its client."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # there is none here
            return
        if scope["type"] != "http" or self._is_open(scope):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        who = self.keys.identify(headers)
        if who is None:
            await answer(_unknown(headers))(scope, receive, _challenging(send))
            return
        if self.keys.has_admin and not who.is_admin and _needs_admin(scope):
            message = "this is the operator's to do: it needs the server's --admin-api-key"
            await answer(ClientError(403, message, code="not_allowed"))(scope, receive, send)
            return
        name = who.client or _address(scope)
        try:
            self.budgets.take_request(name)
        except RateLimited as error:
            await answer(client_error(error))(scope, receive, self._telling(send, name))
            return
        with visiting(self._visit(who, name)):
            await self.app(scope, receive, self._telling(send, name))

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"]
        if path == "/metrics":
            return self.metrics_without_key
        if path == "/health":
            return not scope.get("query_string")  # the deep form makes work
        return path in OPEN_PATHS or path.startswith(OPEN_PREFIXES or ("\0",))

    def _visit(self, who: Identity, name: str) -> Visit:
        """The visit, going on from the one that the request's log began."""
        begun = current_visit()
        return Visit(
            request_id="" if begun is None else begun.request_id,
            client=who.client,
            sees_all=who.is_admin,
            charge=lambda images, pixels: self.budgets.charge(name, images, pixels),
            facts={} if begun is None else begun.facts,
        )

    def _telling(self, send: Send, name: str) -> Send:
        return _with_headers(send, lambda: list(self.budgets.headers(name)))


def _needs_admin(scope: Scope) -> bool:
    return any(
        scope["method"] == method and (scope["path"] + "/").startswith(path + "/")
        for method, path in _ADMIN
    )


def _unknown(headers: Headers) -> ClientError:
    if "authorization" not in headers:
        message, code = "an API key is needed: send 'Authorization: Bearer KEY'", "missing_api_key"
    else:
        message, code = "the API key is not one of this server's", "invalid_api_key"
    return ClientError(401, message, code=code, retry=False)


def _challenging(send: Send) -> Send:
    return _with_headers(send, lambda: [("www-authenticate", 'Bearer realm="sglang"')])


def _with_headers(send: Send, more: Callable[[], list[tuple[str, str]]]) -> Send:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in more():
                headers[name] = value
        await send(message)

    return sending


def _address(scope: Scope) -> str:
    """Who asks where there are no keys: a host, or a whole network as IPv6 gives them to hosts."""
    host = (scope.get("client") or ("unknown", 0))[0]
    return ":".join(host.split(":")[:4]) if ":" in host and "." not in host else host
