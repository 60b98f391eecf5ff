"""API keys: who a request is from, by the hash of the key it shows."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from starlette.datastructures import Headers

from sglang.multimodal_gen.runtime.server_args.guard_section import GuardArgs, key_digest

_MAX_KEY = 4096


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose request it is: ``client`` names a key without giving away anything of it."""

    client: str | None
    is_admin: bool


ANYBODY = Identity(None, True)
"""Where no key is asked for."""


class KeyRing:
    """The keys that are known, as hashes. None of them is in this process's own words or logs."""

    def __init__(self, guard: GuardArgs) -> None:
        self.needs_key = guard.needs_key
        self._admin = guard.admin_api_key
        self._known = tuple(
            digest.encode() for digest in dict.fromkeys((*guard.digests, self._admin or ""))
            if digest
        )  # fmt: skip

    def identify(self, headers: Headers) -> Identity | None:
        """Who shows a known key; None if nobody does. Takes the same time for every wrong key."""
        if not self.needs_key:
            return ANYBODY
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key or len(key) > _MAX_KEY or _is_hash(key):
            return None
        shown = key_digest(key).encode()
        matches = [hmac.compare_digest(shown, known) for known in self._known]
        if not any(matches):
            return None
        digest = self._known[matches.index(True)]
        # Without an operator's key, every key may do what an operator may, to what is its own.
        return Identity(_client_of(digest), is_admin=digest.decode() == self._admin)

    @property
    def has_admin(self) -> bool:
        """Whether some verbs are the operator's alone."""
        return self._admin is not None


def _client_of(digest: bytes) -> str:
    return "key-" + hashlib.sha256(b"client of " + digest).hexdigest()[:16]


def _is_hash(key: str) -> bool:
    """A hash is what is kept, and no key: whoever read a file of hashes knows none."""
    return key_digest(key) == key
