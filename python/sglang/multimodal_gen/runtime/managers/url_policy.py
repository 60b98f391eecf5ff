"""Which addresses the server may call: none of its own network, unless the operator allows it."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest

_SCHEMES = ("http", "https")
_MAX_LENGTH = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlPolicy:
    """``allow_private`` also lets private, loopback and link-local addresses be called."""

    field: str = "url"
    allow_private: bool = False


def check_url(url: str, policy: UrlPolicy) -> tuple[str, ...]:
    """The addresses that a URL's host has now, all of which may be called.

    Raises:
        InvalidRequest: no http(s) URL, a host that is not found, or an address that is not allowed.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise _refused(policy, "is no valid URL") from error
    if len(url) > _MAX_LENGTH or parts.scheme not in _SCHEMES or not parts.hostname:
        raise _refused(policy, "must be an http(s) URL")
    if parts.username is not None or parts.password is not None:
        raise _refused(policy, "must carry no user name or password")
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _refused(policy, "its host is not found") from error
    addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not policy.allow_private:
        for address in addresses:
            if not _is_public(address):
                raise _refused(policy, "its host is not a public address")
    return addresses


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    ip = ip if mapped is None else mapped
    return ip.is_global and not ip.is_multicast


def _refused(policy: UrlPolicy, problem: str) -> InvalidRequest:
    return InvalidRequest(policy.field, "(not shown)", problem)
