"""Who may ask ``sglang serve``, how much, what it fetches for them, and what it tells of itself."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sglang.multimodal_gen.runtime.server_args.flags import check_fields, flag
from sglang.multimodal_gen.runtime.utils.environ import API_KEYS
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

RequestLog = Literal["text", "json", "off"]
_HASHED = re.compile(r"sha256:[0-9a-f]{64}")
_DOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_HIDDEN = "..."


def key_digest(key: str) -> str:
    """What is kept of a key: ``sha256:`` and its hash; a hash is its own."""
    if _HASHED.fullmatch(key):
        return key
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardArgs:
    """Keys and rates. Of keys, only hashes are kept: the fields hold those as soon as they exist.

    A key may be given as its hash, ``sha256:`` and 64 hexadecimal digits.
    """

    api_key: str | tuple[str, ...] = flag(
        default_factory=tuple,
        help="Key(s) that clients must show as 'Authorization: Bearer KEY'; more come from "
        "--api-key-file and the variable SGLANG_API_KEY. Without any, everybody may ask.",
    )
    api_key_file: str | None = flag(
        None, help="File with a key, or its sha256:HASH, on each line; '#' begins a comment."
    )
    admin_api_key: str | None = flag(
        None,
        help="A key that sees everybody's jobs and files, and without which no adapter is loaded "
        "or removed; by default any key may do the latter.",
    )
    metrics_without_key: bool = flag(
        False, help="Answer /metrics without a key too, for a scraper that has none."
    )
    requests_per_minute: int | None = flag(
        None, help="Requests a minute of one key; without keys, of one address."
    )
    images_per_minute: int | None = flag(None, help="Pictures a minute of one key or address.")
    megapixels_per_minute: float | None = flag(
        None, help="Million pixels a minute of one key or address; a video has those of its frames."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        given = (self.api_key,) if isinstance(self.api_key, str) else tuple(self.api_key)
        keys = [*given, *API_KEYS.read(), *self._filed()]
        for key in (*keys, *([] if self.admin_api_key is None else [self.admin_api_key])):
            _check_key(key)
        digests = tuple(dict.fromkeys(map(key_digest, keys)))
        object.__setattr__(self, "api_key", digests)
        if self.admin_api_key is not None:
            object.__setattr__(self, "admin_api_key", key_digest(self.admin_api_key))
        for name in ("requests_per_minute", "images_per_minute", "megapixels_per_minute"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 10**9:
                raise InvalidArgument(name, value, "must lie above 0, up to 1000000000.")

    @property
    def digests(self) -> tuple[str, ...]:
        """The hashes of the clients' keys, the operator's not among them."""
        return tuple(self.api_key)

    @property
    def needs_key(self) -> bool:
        """Whether clients must show a key."""
        return bool(self.api_key) or self.admin_api_key is not None

    def _filed(self) -> list[str]:
        if self.api_key_file is None:
            return []
        try:
            text = Path(self.api_key_file).expanduser().read_text()
        except (OSError, ValueError) as error:
            problem = f"cannot be read ({getattr(error, 'strerror', None) or 'no text'})."
            raise InvalidArgument("api_key_file", self.api_key_file, problem) from error
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        keys = [line for line in lines if line]
        if not keys:
            raise InvalidArgument("api_key_file", self.api_key_file, "holds no key.")
        return keys


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchArgs:
    """Input pictures that clients name by address, in place of sending them."""

    fetch_urls: bool = flag(True, help="Fetch input pictures from URLs that clients name.")
    fetch_schemes: tuple[str, ...] = flag(("https", "http"), help="Schemes of such URLs.")
    fetch_ports: tuple[int, ...] = flag((443, 80), help="Ports of such URLs.")
    fetch_hosts: tuple[str, ...] = flag(
        default_factory=tuple, help="Only from these domains and those below them."
    )
    fetch_allow_networks: tuple[str, ...] = flag(
        default_factory=tuple,
        help="Networks (10.1.0.0/16) that may be fetched from though they are not public.",
    )
    fetch_max_redirects: int = flag(3, help="Redirects that are followed, each checked again.")
    fetch_timeout: float = flag(10.0, help="Seconds that one picture may take, redirects included.")
    fetch_max_mb: float = flag(20.0, help="MiB of a picture by URL, or in a JSON body.")

    def __post_init__(self) -> None:
        check_fields(self)
        for scheme in self.fetch_schemes:
            if scheme not in ("http", "https"):
                raise InvalidArgument("fetch_schemes", scheme, "only http and https are spoken.")
        for port in self.fetch_ports:
            if not 1 <= port <= 65535:
                raise InvalidArgument("fetch_ports", port, "must lie in 1..65535.")
        for host in self.fetch_hosts:
            if not _DOMAIN.fullmatch(host.lower()):
                raise InvalidArgument("fetch_hosts", host, "is no domain name.")
        for network in self.fetch_allow_networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                problem = f"is no network ({error})."
                raise InvalidArgument("fetch_allow_networks", network, problem) from error
        if not 0 <= self.fetch_max_redirects <= 20:
            raise InvalidArgument("fetch_max_redirects", self.fetch_max_redirects, "0..20.")
        if not 0 < self.fetch_timeout <= 600:
            raise InvalidArgument("fetch_timeout", self.fetch_timeout, "must lie in 0..600.")
        if not 0 < self.fetch_max_mb <= 1024:
            raise InvalidArgument("fetch_max_mb", self.fetch_max_mb, "must lie in 0..1024.")


@dataclass(frozen=True, kw_only=True, slots=True)
class SeeingArgs:
    """What the server tells of its work."""

    request_log: RequestLog = flag(
        "text", help="One line a request on standard error: as text, as JSON, or none."
    )
    otlp_traces_endpoint: str | None = flag(
        None,
        help="Send OpenTelemetry traces to this OTLP/HTTP address; needs the extra 'otel'.",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        url = self.otlp_traces_endpoint
        if url is not None and not re.fullmatch(r"https?://[^\s]+", url):
            raise InvalidArgument("otlp_traces_endpoint", url, "must be an http(s) URL.")


def _check_key(key: str) -> None:
    """Refuse what no header can carry; the key itself is never shown."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        problem = "a key is empty, or holds spaces or other than ASCII characters."
        raise InvalidArgument("api_key", _HIDDEN, problem)
