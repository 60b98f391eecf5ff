"""A job store that never makes a denoising step wait, and outlives a full disk."""

from __future__ import annotations

import builtins
import dataclasses
import logging
import threading
from typing import Any

from sglang.multimodal_gen.runtime.managers.jobs import IdempotencyKey, JobRecord, JobStore
from sglang.multimodal_gen.runtime.utils.errors import StoreUnavailable

logger = logging.getLogger(__name__)


class BufferedJobStore:
    """Keeps progress in memory until `flush`, and whole records while ``inner`` cannot take them.

    Whoever asks here sees everything; another server sees what was flushed. A record whose work
    ends with its connection (``rerun`` None) is served from memory while the database is gone, and
    written when it is back; one that must survive is refused instead.
    """

    def __init__(self, inner: JobStore) -> None:
        self.inner = inner
        self._later: dict[str, tuple[str | None, dict[str, Any]]] = {}
        self._unsaved: dict[str, JobRecord] = {}
        self._lock = threading.Lock()

    def add(self, record: JobRecord, key: IdempotencyKey | None = None) -> JobRecord:
        """Keep a new record."""
        try:
            return self.inner.add(record, key)
        except StoreUnavailable as error:
            if record.rerun is not None or key is not None:
                raise
            logger.warning("%s; job %s is kept in memory", error, record.id)
            with self._lock:
                self._unsaved[record.id] = record
            return record

    def find(self, key: IdempotencyKey, now: float) -> JobRecord | None:
        """The record that came before under a key."""
        return self.inner.find(key, now)

    def get(self, job_id: str) -> JobRecord | None:
        """The record of an id, with what was not written yet."""
        with self._lock:
            record = self._unsaved.get(job_id)
            _, later = self._later.get(job_id, (None, {}))
        if record is None:
            record = self.inner.get(job_id)
        return record if record is None or record.final else dataclasses.replace(record, **later)

    def list(
        self,
        *,
        kind: str | None = None,
        limit: int = 100,
        newest_first: bool = True,
        after: str | None = None,
        client: str | None = None,
    ) -> builtins.list[JobRecord]:
        """Records by age, with what was not written yet."""
        found = self.inner.list(
            kind=kind, limit=limit, newest_first=newest_first, after=after, client=client
        )
        with self._lock:
            later = {job_id: changes for job_id, (_, changes) in self._later.items()}
        return [r if r.final else dataclasses.replace(r, **later.get(r.id, {})) for r in found]

    def update(
        self, job_id: str, *, only_if_owner: str | None = None, **changes: Any
    ) -> JobRecord | None:
        """Change fields at once, together with what waited."""
        with self._lock:
            waiting = self._later.get(job_id)
            _, later = waiting or (None, {})
            unsaved = self._unsaved.get(job_id)
            if unsaved is not None:
                if unsaved.final:
                    return None
                unsaved = dataclasses.replace(unsaved, **later | changes)
                self._unsaved[job_id] = unsaved
                self._later.pop(job_id, None)
                return unsaved
        try:
            record = self.inner.update(job_id, only_if_owner=only_if_owner, **later | changes)
        except StoreUnavailable:
            with self._lock:
                self._later[job_id] = (only_if_owner, later | changes)
            raise
        self._written(job_id, waiting)
        return record

    def update_later(
        self, job_id: str, *, only_if_owner: str | None = None, **changes: Any
    ) -> None:
        """Change fields in memory; the next `flush` writes them."""
        with self._lock:
            _, later = self._later.get(job_id, (None, {}))
            self._later[job_id] = (only_if_owner, later | changes)

    def flush(self) -> None:
        """Write what waits; what cannot be written waits on."""
        with self._lock:
            unsaved = list(self._unsaved.values())
        for record in unsaved:
            self._save(record)
        with self._lock:
            later = dict(self._later)
        for job_id, waiting in later.items():
            owner, changes = waiting
            self.inner.update(job_id, only_if_owner=owner, **changes)
            self._written(job_id, waiting)

    def _written(self, job_id: str, waiting: tuple[str | None, dict[str, Any]] | None) -> None:
        """What waited is in the database. Until now it was read from here, and nobody saw an older
        state in between; what came since waits on."""
        with self._lock:
            if waiting is not None and self._later.get(job_id) is waiting:
                del self._later[job_id]

    def delete(self, job_id: str) -> bool:
        """Forget a record."""
        with self._lock:
            self._later.pop(job_id, None)
            unsaved = self._unsaved.pop(job_id, None)
        return unsaved is not None or self.inner.delete(job_id)

    def sweep(self, now: float) -> builtins.list[JobRecord]:
        """Forget what expired."""
        with self._lock:
            gone = [
                r
                for r in self._unsaved.values()
                if r.expires_at is not None and r.expires_at <= now
            ]
            for record in gone:
                del self._unsaved[record.id]
        return [*gone, *self.inner.sweep(now)]

    def claim(
        self, owner: str, model: str, now: float, lease_until: float, limit: int
    ) -> builtins.list[JobRecord]:
        """Take over unfinished work that nobody has."""
        return self.inner.claim(owner, model, now, lease_until, limit)

    def claim_ended(self, owner: str, now: float, lease_until: float) -> builtins.list[JobRecord]:
        """Take over what nobody has and nobody is to do."""
        return self.inner.claim_ended(owner, now, lease_until)

    def renew(self, owner: str, lease_until: float) -> builtins.list[JobRecord]:
        """Say that a server is still there."""
        return self.inner.renew(owner, lease_until)

    def __len__(self) -> int:
        return len(self._unsaved) + len(self.inner)  # type: ignore[arg-type]

    def _save(self, record: JobRecord) -> None:
        known = self.inner.get(record.id)
        if known is None:  # else the first try came through, and only its answer was lost
            known = record
            if record.final and record.webhook is not None:  # the store tells of an end it sees
                known = dataclasses.replace(record, status="in_progress", completed_at=None)
            self.inner.add(known)
        with self._lock:
            newest = self._unsaved.pop(record.id, record)
            changes = {
                f.name: getattr(newest, f.name)
                for f in dataclasses.fields(newest)
                if getattr(newest, f.name) != getattr(known, f.name)
            }
            if changes and not known.final:
                self._later[record.id] = (None, changes)
