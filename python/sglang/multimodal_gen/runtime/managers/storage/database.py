"""The database behind jobs, files, keys and webhooks: its tables, their version, and how it opens.

SQLite (a file, with a write-ahead log; or in memory) and PostgreSQL. Times are seconds since 1970.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Connection,
    Double,
    Engine,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
    insert,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from sglang.multimodal_gen.runtime.managers.storage.breaker import Breaker
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, StoreUnavailable

SCHEMA_VERSION = 1
Migration = Callable[[Connection], None]
MIGRATIONS: tuple[Migration, ...] = ()
"""Entry k brings version k + 1 to k + 2, so there is one less than `SCHEMA_VERSION`."""

_BUSY_SECONDS = 10.0  # that a writer waits for another server's write to the same file
_CONNECT_SECONDS = 10  # that PostgreSQL may take to answer
REST_SECONDS = 3.0
"""That writers are refused at once after one that got no answer."""
_LOCK = 0x5647_4C41  # PostgreSQL's advisory lock while tables are made or changed

metadata = MetaData()

schema_info = Table(
    "schema_info", metadata,
    Column("name", String(32), primary_key=True),
    Column("value", String(64), nullable=False),
)  # fmt: skip

jobs = Table(
    "jobs", metadata,
    Column("id", String(64), primary_key=True),
    Column("kind", String(64), nullable=False),
    Column("model", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("status", String(16), nullable=False),
    Column("progress", Integer, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("started_at", Double),
    Column("completed_at", Double),
    Column("expires_at", Double),
    Column("settings", JSON, nullable=False),
    Column("warnings", JSON, nullable=False),
    Column("results", JSON, nullable=False),
    Column("error", JSON),
    Column("rerun", JSON),
    Column("inputs", JSON, nullable=False),
    Column("deadline", Double),
    Column("owner", String(64)),
    Column("lease_until", Double),
    Column("cancel_requested", Boolean, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("resumed_at_step", Integer),
    Column("webhook", Text),
    Column("client", String(128)),
    Index("jobs_by_status", "status", "owner"),
    Index("jobs_by_expiry", "expires_at"),
    Index("jobs_by_age", "kind", "created_at"),
)  # fmt: skip

files = Table(
    "files", metadata,
    Column("id", String(64), primary_key=True),
    Column("name", String(128), nullable=False),
    Column("media_type", String(128), nullable=False),
    Column("size", Integer, nullable=False),
    Column("expires_at", Double, nullable=False, index=True),
    Column("client", String(128)),
)  # fmt: skip

idempotency_keys = Table(
    "idempotency_keys", metadata,
    Column("scope", String(128), primary_key=True),
    Column("key", String(256), primary_key=True),
    Column("fingerprint", String(64), nullable=False),
    Column("job_id", String(64), nullable=False, index=True),
)  # fmt: skip

webhooks = Table(
    "webhooks", metadata,
    Column("id", String(64), primary_key=True),
    Column("job_id", String(64), nullable=False),
    Column("url", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("next_at", Double, nullable=False, index=True),
)  # fmt: skip


class Database:
    """An open database whose tables are of this version.

    Raises:
        InvalidArgument: the URL is none, its driver is missing, or the tables are of a newer
            version.
        StoreUnavailable: it cannot be opened.
    """

    def __init__(
        self,
        url: str,
        *,
        migrations: Sequence[Migration] = MIGRATIONS,
        tell: Callable[[str], object] = lambda sentence: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine, self.in_memory = _engine(url)
        # SQLite takes one writer at a time; in memory, all threads share the one connection.
        self._one_at_a_time = threading.RLock() if self.is_sqlite else contextlib.nullcontext()
        self._breaker = Breaker(REST_SECONDS, clock)
        self.migrations = migrations
        self.version = len(migrations) + 1
        try:
            with self.write() as connection:
                self.store_id = self._bring_up_to_date(connection, tell)
        except BaseException:
            self.close()
            raise

    @property
    def is_sqlite(self) -> bool:
        """Whether this is SQLite."""
        return self.engine.dialect.name == "sqlite"

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that writes; whole, or not at all.

        Raises:
            StoreUnavailable: the database does not answer, is full, or cannot be written; or did
                not answer another writer in the last seconds.
        """
        with self._translated(), self._breaker.attempt() as again, self._one_at_a_time:
            if not again:
                self._breaker.check()  # the one before has waited long, and in vain
            with contextlib.ExitStack() as stack:
                try:
                    connection = stack.enter_context(self.engine.connect())
                    connection = connection.execution_options(writes=True)
                    stack.enter_context(connection.begin())
                except SQLAlchemyError:
                    self._breaker.failed()
                    raise
                self._breaker.worked()
                yield connection

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection to read from; raises as `write`."""
        turn = self._one_at_a_time if self.in_memory else contextlib.nullcontext()
        with self._translated(), turn, self.engine.connect() as connection:
            yield connection

    def close(self) -> None:
        """Let go of the connections, once nobody is at work on the one that threads share."""
        with self._one_at_a_time:
            self.engine.dispose()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            cause = getattr(error, "orig", None) or error
            raise StoreUnavailable(f"the job store does not work: {cause}") from error

    def _bring_up_to_date(self, connection: Connection, tell: Callable[[str], object]) -> str:
        """Make the tables, or migrate them one version after the other; the store's id."""
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        if not inspect(connection).has_table(schema_info.name):
            metadata.create_all(connection)
            store_id = uuid.uuid4().hex
            rows = [{"name": "version", "value": "1"}, {"name": "store", "value": store_id}]
            connection.execute(insert(schema_info), rows)
        known = dict(connection.execute(select(schema_info.c.name, schema_info.c.value)).all())
        found = int(known["version"])
        if found > self.version:
            problem = (
                f"has tables of version {found}, and this program knows {self.version}. Use the "
                "newer program, or another store."
            )
            raise InvalidArgument("job_store", _shown(self.engine), problem)
        for number in range(found, self.version):
            self.migrations[number - 1](connection)
            tell(f"job store: tables brought from version {number} to {number + 1}")
        connection.execute(
            update(schema_info)
            .where(schema_info.c.name == "version")
            .values(value=str(self.version))
        )
        return known["store"]


def _engine(url: str) -> tuple[Engine, bool]:
    """The engine of an address, and whether it is a database in memory."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        problem = "is no database URL: 'memory', sqlite:///FILE or postgresql://..."
        raise InvalidArgument("job_store", "(not shown)", problem) from None
    backend = parsed.get_backend_name()
    if backend == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    elif backend != "sqlite":
        problem = "must be 'memory', sqlite:///FILE or postgresql://..."
        raise InvalidArgument("job_store", parsed.render_as_string(), problem)
    in_memory = backend == "sqlite" and parsed.database in (None, "", ":memory:")
    options: dict[str, object] = {"pool_pre_ping": True}
    if in_memory:
        options = {"poolclass": StaticPool, "connect_args": {"check_same_thread": False}}
    elif backend == "sqlite":
        options["connect_args"] = {"timeout": _BUSY_SECONDS}
        _make_folder(Path(str(parsed.database)))
    else:
        options["connect_args"] = _postgres_options(parsed)
    try:
        engine = create_engine(parsed, **options)
    except (ImportError, NoSuchModuleError) as error:
        problem = "needs the extra 'postgres': pip install 'sglang-diffusion[postgres]'"
        raise InvalidArgument("job_store", parsed.render_as_string(), problem) from error
    if backend == "sqlite":
        _tune_sqlite(engine)
    return engine, in_memory


def _postgres_options(url: URL) -> dict[str, int]:
    """Limits for a network that swallows everything, where the URL names none: without them a
    connection waits for minutes, and an open one for a quarter of an hour."""
    limits = {
        "connect_timeout": _CONNECT_SECONDS,
        "tcp_user_timeout": 2000 * _CONNECT_SECONDS,  # milliseconds without an acknowledgement
        "keepalives_idle": _CONNECT_SECONDS,
        "keepalives_interval": 5,
        "keepalives_count": 3,
    }
    return {name: value for name, value in limits.items() if name not in url.query}


def _make_folder(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreUnavailable(
            f"no place for the job store: {str(file.parent)!r}: {error.strerror}"
        ) from error


def _tune_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def _connected(connection: object, _: object) -> None:
        connection.isolation_level = None  # type: ignore[attr-defined]  # `_begun` begins
        cursor = connection.cursor()  # type: ignore[attr-defined]
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begun(connection: Connection) -> None:
        # A writer that only finds out at its first UPDATE that another writes would fail at once.
        writes = connection.get_execution_options().get("writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _shown(engine: Engine) -> str:
    return engine.url.render_as_string(hide_password=True)
