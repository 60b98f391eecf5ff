"""Job records in a database."""

from __future__ import annotations

import builtins
import dataclasses
import json
import uuid
from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    delete,
    insert,
    literal,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.exc import IntegrityError

from sglang.multimodal_gen.runtime.managers.jobs import FINAL, IdempotencyKey, JobRecord
from sglang.multimodal_gen.runtime.managers.storage.database import (
    Database,
    idempotency_keys,
    jobs,
    webhooks,
)
from sglang.multimodal_gen.runtime.utils.errors import KeyReused, StoreUnavailable

_SWEPT_AT_ONCE = 1000
_UNFINISHED = ("queued", "in_progress")
assert not FINAL & set(_UNFINISHED)


class SqlJobStore:
    """A `JobStore` in a database that several servers may share.

    Each change is one transaction with its condition in the UPDATE: of two servers that try, one
    succeeds. The webhook of a job is written together with its end. ``max_finished`` bounds the
    finished records that are kept, for a database in memory.
    """

    def __init__(self, database: Database, *, max_finished: int | None = None) -> None:
        self.database = database
        self.max_finished = max_finished

    def add(self, record: JobRecord, key: IdempotencyKey | None = None) -> JobRecord:
        """Keep a new record, or find the one that came before under the same key."""
        if key is None:
            with self.database.write() as connection:
                connection.execute(insert(jobs), _row(record))
            return record
        for _ in range(2):
            before = self.find(key, record.created_at)
            if before is not None:
                return before
            if self._add_with_key(record, key):
                return record
        before = self.find(key, record.created_at)
        if before is None:  # its jobs come and go: each was refused for want of room
            raise StoreUnavailable("the job of this key went while it was looked for")
        return before

    def find(self, key: IdempotencyKey, now: float) -> JobRecord | None:
        """The record that came before under a key."""
        same = and_(idempotency_keys.c.scope == key.scope, idempotency_keys.c.key == key.key)
        with self.database.read() as connection:
            known = connection.execute(select(idempotency_keys).where(same)).mappings().first()
            if known is None:
                return None
            record = _read(connection, known["job_id"])
        if record is not None and record.files_gone(now):
            with self.database.write() as connection:
                mine = and_(same, idempotency_keys.c.job_id == record.id)
                connection.execute(delete(idempotency_keys).where(mine))
            return None
        if known["fingerprint"] != key.fingerprint:
            raise KeyReused(
                "Idempotency-Key: this key came before with another request; use a new key for "
                "each request"
            )
        return record

    def get(self, job_id: str) -> JobRecord | None:
        """The record of an id."""
        with self.database.read() as connection:
            return _read(connection, job_id)

    def list(
        self,
        *,
        kind: str | None = None,
        limit: int = 100,
        newest_first: bool = True,
        after: str | None = None,
        client: str | None = None,
    ) -> builtins.list[JobRecord]:
        """Records by age."""
        age = (jobs.c.created_at, jobs.c.id)
        query = select(jobs).order_by(*(c.desc() for c in age) if newest_first else age)
        if kind is not None:
            query = query.where(jobs.c.kind == kind)
        if client is not None:
            query = query.where(jobs.c.client == client)
        with self.database.read() as connection:
            if after is not None:
                last = _read(connection, after)
                if last is None:
                    return []
                place = tuple_(*age)
                there = tuple_(literal(last.created_at), literal(last.id))
                query = query.where(place < there if newest_first else place > there)
            return [_record(row) for row in connection.execute(query.limit(limit)).mappings()]

    def update(
        self, job_id: str, *, only_if_owner: str | None = None, **changes: Any
    ) -> JobRecord | None:
        """Change fields of a record that is not final."""
        wanted = [jobs.c.id == job_id, jobs.c.status.in_(_UNFINISHED)]
        if only_if_owner is not None:
            wanted.append(jobs.c.owner == only_if_owner)
        with self.database.write() as connection:
            change = update(jobs).where(*wanted).values(**_plain(changes))
            if connection.execute(change).rowcount != 1:
                return None
            record = _read(connection, job_id)
            assert record is not None
            if record.final and record.webhook is not None:
                connection.execute(insert(webhooks), _delivery(record))
            return record

    def update_later(
        self, job_id: str, *, only_if_owner: str | None = None, **changes: Any
    ) -> None:
        """The same; see `BufferedJobStore` for one that does not wait."""
        self.update(job_id, only_if_owner=only_if_owner, **changes)

    def flush(self) -> None:
        """Nothing waits here."""

    def delete(self, job_id: str) -> bool:
        """Forget a record."""
        with self.database.write() as connection:
            connection.execute(delete(idempotency_keys).where(idempotency_keys.c.job_id == job_id))
            return connection.execute(delete(jobs).where(jobs.c.id == job_id)).rowcount == 1

    def sweep(self, now: float) -> builtins.list[JobRecord]:
        """Forget what expired, with its keys; the oldest finished ones too where there are many."""
        with self.database.read() as connection:
            gone = self._expired(connection, now)
        if not gone:
            return []
        with self.database.write() as connection:
            ids = [record.id for record in self._expired(connection, now)]
            connection.execute(delete(idempotency_keys).where(idempotency_keys.c.job_id.in_(ids)))
            connection.execute(delete(jobs).where(jobs.c.id.in_(ids)))
        return [record for record in gone if record.id in set(ids)]

    def claim(
        self, owner: str, model: str, now: float, lease_until: float, limit: int
    ) -> builtins.list[JobRecord]:
        """Take over unfinished work that nobody has."""
        if limit <= 0:
            return []
        return self._take(and_(jobs.c.model == model, _free(now)), owner, lease_until, limit)

    def claim_ended(self, owner: str, now: float, lease_until: float) -> builtins.list[JobRecord]:
        """Take over what nobody has and nobody is to do; show as queued what else nobody has."""
        over = or_(jobs.c.cancel_requested.is_(True), jobs.c.deadline <= now)
        ended = self._take(and_(_free(now), over), owner, lease_until, _SWEPT_AT_ONCE)
        left = and_(_free(now), jobs.c.status == "in_progress")
        with self.database.read() as connection:
            some = connection.execute(select(jobs.c.id).where(left).limit(1)).first()
        if some is not None:
            with self.database.write() as connection:
                connection.execute(update(jobs).where(left).values(status="queued"))
        return ended

    def _take(
        self, free: ColumnElement[bool], owner: str, lease_until: float, limit: int
    ) -> builtins.list[JobRecord]:
        """Those of ``free`` that this owner gets before another."""
        found = select(jobs.c.id).where(free).order_by(jobs.c.created_at, jobs.c.id).limit(limit)
        with self.database.read() as connection:
            ids = connection.execute(found).scalars().all()
        claimed = []
        for job_id in ids:
            with self.database.write() as connection:
                taking = update(jobs).where(jobs.c.id == job_id, free)
                taking = taking.values(owner=owner, lease_until=lease_until)
                if connection.execute(taking).rowcount == 1:
                    record = _read(connection, job_id)
                    assert record is not None
                    claimed.append(record)
        return claimed

    def renew(self, owner: str, lease_until: float) -> builtins.list[JobRecord]:
        """Say that a server is still there."""
        own = and_(jobs.c.owner == owner, jobs.c.status.in_(_UNFINISHED))
        with self.database.write() as connection:
            connection.execute(update(jobs).where(own).values(lease_until=lease_until))
            query = select(jobs).where(own).order_by(jobs.c.created_at, jobs.c.id)
            return [_record(row) for row in connection.execute(query).mappings()]

    def disown(self, owner: str) -> int:
        """Let go of all that a server had when it ended without a word; how much that was."""
        own = and_(jobs.c.owner == owner, jobs.c.status.in_(_UNFINISHED))
        with self.database.write() as connection:
            freeing = update(jobs).where(own).values(owner=None, lease_until=None)
            return connection.execute(freeing).rowcount

    def unfinished(self) -> set[str]:
        """The ids of all work that has not ended, of all servers."""
        with self.database.read() as connection:
            query = select(jobs.c.id).where(jobs.c.status.in_(_UNFINISHED))
            return set(connection.execute(query).scalars())

    def __len__(self) -> int:
        with self.database.read() as connection:
            return len(connection.execute(select(jobs.c.id)).all())

    def _add_with_key(self, record: JobRecord, key: IdempotencyKey) -> bool:
        row = dataclasses.asdict(key) | {"job_id": record.id}
        with self.database.write() as connection:
            try:
                with connection.begin_nested():
                    connection.execute(insert(idempotency_keys), row)
            except IntegrityError:  # another request, or another server, was a moment earlier
                return False
            connection.execute(insert(jobs), _row(record))
        return True

    def _expired(self, connection: Connection, now: float) -> builtins.list[JobRecord]:
        over = select(jobs).where(jobs.c.expires_at <= now).limit(_SWEPT_AT_ONCE)
        gone = [_record(row) for row in connection.execute(over).mappings()]
        if self.max_finished is not None:
            finished = jobs.c.status.in_(sorted(FINAL))
            query = select(jobs).where(finished, jobs.c.expires_at > now)
            query = query.order_by(jobs.c.completed_at.desc())
            query = query.offset(self.max_finished).limit(_SWEPT_AT_ONCE)
            gone += [_record(row) for row in connection.execute(query).mappings()]
        return gone


def _free(now: float) -> ColumnElement[bool]:
    """Unfinished, and nobody's."""
    nobodys = or_(jobs.c.owner.is_(None), jobs.c.lease_until < now)
    return and_(jobs.c.status.in_(_UNFINISHED), nobodys)


_FIELDS = {f.name for f in dataclasses.fields(JobRecord)}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as the columns take them: JSON's lists and objects."""
    unknown = values.keys() - _FIELDS
    assert not unknown, f"no fields of a job record: {sorted(unknown)}"
    return {
        name: dict(value)
        if isinstance(value, Mapping)
        else list(value)
        if isinstance(value, tuple)
        else value
        for name, value in values.items()
    }


def _row(record: JobRecord) -> dict[str, Any]:
    return _plain({name: getattr(record, name) for name in _FIELDS})


def _record(row: Any) -> JobRecord:
    """A record of a row, by column name."""
    values: dict[str, Any] = {name: row[name] for name in _FIELDS}
    values["warnings"], values["results"] = tuple(row["warnings"]), tuple(row["results"])
    return JobRecord(**values)


def _read(connection: Connection, job_id: str) -> JobRecord | None:
    row = connection.execute(select(jobs).where(jobs.c.id == job_id)).mappings().first()
    return None if row is None else _record(row)


def _delivery(record: JobRecord) -> dict[str, Any]:
    """The message that a job has ended, to be sent at once."""
    about = {
        "type": f"job.{record.status}",
        "created_at": int(record.completed_at or 0),
        "data": {
            "id": record.id,
            "kind": record.kind,
            "model": record.model,
            "status": record.status,
            "error": record.error,
        },
    }
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "job_id": record.id,
        "url": record.webhook,
        "body": json.dumps(about),
        "created_at": record.completed_at or 0.0,
        "attempts": 0,
        "next_at": record.completed_at or 0.0,
    }
