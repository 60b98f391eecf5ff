"""Job records: what is known about each piece of work, as plain data, and where they are kept."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from sglang.multimodal_gen.runtime.managers.visit import current_client

JobStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled"]
FINAL: frozenset[JobStatus] = frozenset({"completed", "failed", "cancelled"})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One piece of work. Times are seconds since 1970; all values can be written as JSON.

    ``settings`` are those asked for; ``results`` has one entry an output (``seed`` and, where it
    is kept, ``file_id``, ``content_type`` and ``bytes``); ``error`` has ``message``, ``type`` and
    ``code``.
    """

    id: str
    kind: str
    model: str
    created_at: float
    status: JobStatus = "queued"
    progress: int = 0
    priority: int = 0
    started_at: float | None = None
    completed_at: float | None = None
    expires_at: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    results: Sequence[Mapping[str, Any]] = ()
    error: Mapping[str, Any] | None = None
    rerun: Mapping[str, Any] | None = None
    """What runs it again after a restart (`work_order.order_of`); None for work that ends with
    its caller's connection."""
    inputs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Sampling field -> ids of the files that were uploaded for it."""
    deadline: float | None = None
    owner: str | None = None
    """The server that has it, until ``lease_until`` unless it says that it is still there."""
    lease_until: float | None = None
    cancel_requested: bool = False
    """Another server was asked to cancel it; the owner will."""
    attempts: int = 0
    """How often a server began with it."""
    resumed_at_step: int | None = None
    """Denoising steps that were not done again when it last went on after an interruption."""
    webhook: str | None = None
    """The URL that is told when it ends."""
    client: str | None = field(default_factory=current_client)
    """Whose it is, where clients have keys (`visit`)."""

    def files_gone(self, now: float) -> bool:
        """Whether any of what it made has expired."""
        return any(result.get("expires_at", now + 1) <= now for result in self.results)

    @property
    def final(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.status in FINAL


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """A client's own name for a request; ``fingerprint`` is of what it asked for.

    ``scope`` keeps the keys of different clients apart.
    """

    key: str
    fingerprint: str
    scope: str = ""


class JobStore(Protocol):
    """Where records are kept. Called from several threads, and by several servers.

    All verbs may raise `StoreUnavailable`.
    """

    def add(self, record: JobRecord, key: IdempotencyKey | None = None) -> JobRecord:
        """Keep a new record; returns it, or the one that came before under the same key.

        Raises:
            KeyReused: the key came before with another request.
        """
        ...

    def find(self, key: IdempotencyKey, now: float) -> JobRecord | None:
        """The record that came before under a key; None where there is none (any more).

        A key ends with the first of the files that it stands for.

        Raises:
            KeyReused: the key came before with another request.
        """
        ...

    def get(self, job_id: str) -> JobRecord | None:
        """The record of an id; None where there is none (any more)."""
        ...

    def list(
        self,
        *,
        kind: str | None = None,
        limit: int = 100,
        newest_first: bool = True,
        after: str | None = None,
        client: str | None = None,
    ) -> builtins.list[JobRecord]:
        """Records by age, of one kind or all; those that follow the record ``after`` in this order.

        None follow an id that there is no record of.
        """
        ...

    def update(
        self, job_id: str, *, only_if_owner: str | None = None, **changes: Any
    ) -> JobRecord | None:
        """Change fields; None, and nothing done, where the record is gone or final already, or
        belongs to another server than ``only_if_owner``.
        """
        ...

    def update_later(
        self, job_id: str, *, only_if_owner: str | None = None, **changes: Any
    ) -> None:
        """The same for what may be lost: returns at once, and is written now and then."""
        ...

    def flush(self) -> None:
        """Write what waits."""
        ...

    def delete(self, job_id: str) -> bool:
        """Forget a record, and its key; whether there was one."""
        ...

    def sweep(self, now: float) -> builtins.list[JobRecord]:
        """Forget what expired before ``now``, and say what that was."""
        ...

    def claim(
        self, owner: str, model: str, now: float, lease_until: float, limit: int
    ) -> builtins.list[JobRecord]:
        """Take over unfinished work that nobody has, oldest first; each goes to one server only.

        That is what has no owner, or one whose lease is over; what was this owner's own stays so.
        """
        ...

    def claim_ended(self, owner: str, now: float, lease_until: float) -> builtins.list[JobRecord]:
        """Take over work of any model that nobody has and nobody is to do any more: it was
        cancelled, or its deadline is over. What else nobody has is queued from then on.
        """
        ...

    def renew(self, owner: str, lease_until: float) -> builtins.list[JobRecord]:
        """Say that a server is still there; its unfinished records, as they are now."""
        ...
