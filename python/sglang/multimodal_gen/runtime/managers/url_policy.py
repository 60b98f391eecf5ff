"""Which URLs of others this machine may be made to open: the rule alone, no connection.

`check_url` looks at the text; `resolve` at every address that its host has. Whoever connects does
so to the address that `resolve` returned, and not by the name again: it could have another by then.
Each redirect is a new URL.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from sglang.multimodal_gen.runtime.utils.errors import UserError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Lookup = Callable[[str, int], Sequence[Any]]
"""What `socket.getaddrinfo` does, for a host and a port."""

MAX_URL = 4096
_DEFAULT_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?\.?")
_BAD_CHARACTERS = re.compile(r"[\x00-\x20\x7f-\x9f\\\s]")
# What carries an IPv4 address inside an IPv6 one, and the bits below it.
_EMBEDDING: tuple[tuple[ipaddress.IPv6Network, int], ...] = (
    (ipaddress.IPv6Network("::/96"), 0),
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),
    (ipaddress.IPv6Network("::ffff:0:0:0/96"), 0),
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),
    (ipaddress.IPv6Network("2002::/16"), 80),
)
# Not public, whatever the library's version says: documentation, translation for one's own use,
# Teredo (its addresses are masked), site-local of old, cloud metadata by IPv6 (fd00::/8 covers it).
_NEVER = tuple(
    map(
        ipaddress.ip_network,
        (
            "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16",
            "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16",
            "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
            "168.63.129.16/32", "::/128", "::1/128", "64:ff9b:1::/48", "100::/64", "2001::/23",
            "2001:db8::/32", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10",
            "ff00::/8",
        ),
    )
)  # fmt: skip


class UrlRefused(UserError):
    """A URL that is not opened; ``rule`` is which rule it breaks, in one word."""

    def __init__(self, rule: str, message: str) -> None:
        self.rule = rule
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlPolicy:
    """What may be opened. ``hosts``, where there are some, are the only domains, with those below
    them; ``networks`` are allowed though they are not public. No ``ports`` allows all.
    """

    schemes: tuple[str, ...] = ("https", "http")
    ports: tuple[int, ...] = (443, 80)
    hosts: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()

    def allows(self, address: Address) -> bool:
        """Whether an address may be connected to."""
        inner = embedded(address)
        if inner is not None and not self.allows(inner):
            return False
        allowed = map(ipaddress.ip_network, self.networks)
        return any(address in network for network in allowed) or is_public(address)


@dataclass(frozen=True, slots=True)
class CheckedUrl:
    """A URL whose text is in order; ``host`` is lower-case ASCII, without brackets."""

    scheme: str
    host: str
    port: int
    target: str
    """Path and query."""

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = _DEFAULT_PORTS[self.scheme] == self.port
        return host if usual else f"{host}:{self.port}"

    def at(self, address: Address) -> str:
        """The same at an address instead of the name."""
        host = f"[{address}]" if address.version == 6 else str(address)
        return f"{self.scheme}://{host}:{self.port}{self.target}"


def check_url(url: str, policy: UrlPolicy) -> CheckedUrl:
    """A URL in parts, if its text breaks no rule.

    Raises:
        UrlRefused: says which rule it breaks; the URL itself is not repeated.
    """
    if len(url) > MAX_URL:
        raise UrlRefused("length", f"the URL has more than {MAX_URL} characters")
    if _BAD_CHARACTERS.search(url):
        raise UrlRefused("form", "the URL holds a space, a backslash or a control character")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UrlRefused("form", "this is no URL that can be read") from error
    if parts.scheme not in policy.schemes or parts.scheme not in _DEFAULT_PORTS:
        allowed = " or ".join(policy.schemes) or "none"
        raise UrlRefused("scheme", f"the URL's scheme must be {allowed}")
    if "@" in parts.netloc:
        raise UrlRefused("user", "the URL must not carry a user name or password")
    host = _host(parts.hostname)
    port = _DEFAULT_PORTS[parts.scheme] if port is None else port
    if policy.ports and port not in policy.ports:
        raise UrlRefused("port", f"port {port} is not one that is fetched from")
    if policy.hosts and not any(_below(host, domain) for domain in policy.hosts):
        raise UrlRefused("host", "the URL's host is not one that is fetched from")
    target = parts.path or "/"
    if not target.startswith("/"):
        raise UrlRefused("form", "this is no URL that can be read")
    return CheckedUrl(parts.scheme, host, port, target + (f"?{parts.query}" if parts.query else ""))


def resolve(url: CheckedUrl, policy: UrlPolicy, lookup: Lookup = socket.getaddrinfo) -> Address:
    """The address to connect to. Looks the host up, so it may take a while.

    All of its addresses must be allowed: one that has a forbidden one too is after something.

    Raises:
        UrlRefused: it has no address, or one that is not allowed.
    """
    try:
        found = lookup(url.host, url.port)
    except (OSError, UnicodeError) as error:
        raise UrlRefused("lookup", "the URL's host has no address") from error
    texts = dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found)
    try:
        addresses = [ipaddress.ip_address(text) for text in texts]
    except ValueError as error:
        raise UrlRefused("lookup", "the URL's host has no address") from error
    if not addresses:
        raise UrlRefused("lookup", "the URL's host has no address")
    if not all(map(policy.allows, addresses)):
        raise UrlRefused("address", "the URL's host is at an address that is not fetched from")
    return addresses[0]


def is_public(address: Address) -> bool:
    """Whether an address is one of the open internet's."""
    if any(address in network for network in _NEVER if network.version == address.version):
        return False
    return address.is_global and not address.is_multicast


def embedded(address: Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 one leads to, where it is such a one."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    for network, below in _EMBEDDING:
        if address in network:
            return ipaddress.IPv4Address(int(address) >> below & 0xFFFFFFFF)
    return None


def _host(name: str | None) -> str:
    """A host as it is looked up: an address, or a name in ASCII."""
    if not name:
        raise UrlRefused("form", "the URL has no host")
    if "%" in name:
        raise UrlRefused("form", "the URL's host must name no network interface")
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(name))
    try:
        plain = name.encode("idna").decode("ascii").lower()
    except UnicodeError as error:
        raise UrlRefused("form", "the URL's host is no name") from error
    if not _HOST.fullmatch(plain):
        raise UrlRefused("form", "the URL's host is no name")
    return plain.rstrip(".")


def _below(host: str, domain: str) -> bool:
    return host == domain.lower() or host.endswith("." + domain.lower())
