"""Job records: what is known about each piece of work, as plain data, and where they are kept."""

from __future__ import annotations

import builtins
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

JobStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled"]
FINAL: frozenset[JobStatus] = frozenset({"completed", "failed", "cancelled"})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One piece of work. Times are seconds since 1970; all values can be written as JSON.

    ``settings`` are those asked for; ``results`` has one entry an output (``seed`` and, where it
    is kept, what `keeping.ResultKeeper.keep` says); ``error`` has ``message``, ``type`` and ``code``.
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

    @property
    def final(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.status in FINAL


class JobStore(Protocol):
    """Where records are kept. Called from several threads."""

    def add(self, record: JobRecord) -> None:
        """Keep a new record."""
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
    ) -> builtins.list[JobRecord]:
        """Records by age, of one kind or all; those that follow the record ``after`` in this order.

        None follow an id that there is no record of.
        """
        ...

    def update(self, job_id: str, **changes: Any) -> JobRecord | None:
        """Change fields; None, and nothing done, where the record is gone or final already."""
        ...

    def delete(self, job_id: str) -> bool:
        """Forget a record; whether there was one."""
        ...

    def sweep(self, now: float) -> builtins.list[JobRecord]:
        """Forget what expired before ``now``, and say what that was."""
        ...


class MemoryJobStore:
    """Records in this process. Of finished ones, the oldest go first beyond ``max_records``."""

    def __init__(self, max_records: int = 10_000) -> None:
        self.max_records = max_records
        self._records: dict[str, JobRecord] = {}
        self._lock = threading.Lock()

    def add(self, record: JobRecord) -> None:
        """Keep a new record."""
        with self._lock:
            self._records[record.id] = record
            if len(self._records) > self.max_records:
                oldest = next((r for r in self._records.values() if r.final), None)
                if oldest is not None:
                    del self._records[oldest.id]

    def get(self, job_id: str) -> JobRecord | None:
        """The record of an id."""
        with self._lock:
            return self._records.get(job_id)

    def list(
        self,
        *,
        kind: str | None = None,
        limit: int = 100,
        newest_first: bool = True,
        after: str | None = None,
    ) -> builtins.list[JobRecord]:
        """Records by age."""
        with self._lock:
            records = list(self._records.values())  # as they came
        if newest_first:
            records.reverse()
        if after is not None:
            places = [index for index, record in enumerate(records) if record.id == after]
            records = records[places[0] + 1 :] if places else []
        return [record for record in records if kind in (None, record.kind)][:limit]

    def update(self, job_id: str, **changes: Any) -> JobRecord | None:
        """Change fields of a record that is not final."""
        with self._lock:
            record = self._records.get(job_id)
            if record is None or record.final:
                return None
            record = dataclasses.replace(record, **changes)
            self._records[job_id] = record
            return record

    def delete(self, job_id: str) -> bool:
        """Forget a record."""
        with self._lock:
            return self._records.pop(job_id, None) is not None

    def sweep(self, now: float) -> builtins.list[JobRecord]:
        """Forget what expired."""
        with self._lock:
            gone = [
                record
                for record in self._records.values()
                if record.expires_at is not None and record.expires_at <= now
            ]
            for record in gone:
                del self._records[record.id]
            return gone

    def __len__(self) -> int:
        with self._lock:
            return len(self._records)
