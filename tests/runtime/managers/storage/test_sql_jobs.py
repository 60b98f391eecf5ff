from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select, text

from sglang.multimodal_gen.runtime.managers.jobs import IdempotencyKey, JobRecord
from sglang.multimodal_gen.runtime.managers.storage.buffered_jobs import BufferedJobStore
from sglang.multimodal_gen.runtime.managers.storage.database import Database, webhooks
from sglang.multimodal_gen.runtime.managers.storage.sql_jobs import SqlJobStore
from sglang.multimodal_gen.runtime.utils.errors import (
    InvalidArgument,
    KeyReused,
    StoreUnavailable,
)

FULL = JobRecord(
    id="a",
    kind="image_generation",
    model="m",
    created_at=1.5,
    progress=3,
    priority=-7,
    started_at=2.25,
    settings={"prompt": "ein Fuchs ☃ \U0001f98a", "seed": 2**62, "lora": [{"name": "x"}]},
    warnings=("w",),
    results=({"seed": 2**62, "file_id": "f"},),
    rerun={"settings": {"guidance_scale": 0.1}, "keep": None},
    inputs={"image_path": ["f1", "f2"]},
    deadline=1e9 + 0.125,
    owner="one",
    lease_until=10.0,
    attempts=1,
)


def record(name: str, **changes) -> JobRecord:
    return dataclasses.replace(FULL, id=name, **changes)


@pytest.fixture
def store(address, open_database) -> SqlJobStore:
    return SqlJobStore(open_database(address))


def test_what_goes_in_comes_out(store):
    store.add(FULL)
    assert store.get("a") == FULL
    assert store.get("b") is None
    assert len(store) == 1
    done = store.update("a", status="completed", results=({"seed": 1},), expires_at=5.0)
    assert done == dataclasses.replace(
        FULL, status="completed", results=({"seed": 1},), expires_at=5.0
    )
    assert store.get("a") == done
    assert store.update("a", progress=1) is None  # final
    assert store.update("none", progress=1) is None
    assert store.delete("a")
    assert not store.delete("a")


def test_a_change_is_its_owners_alone(store):
    store.add(FULL)
    assert store.update("a", only_if_owner="two", progress=9) is None
    assert store.get("a").progress == 3
    assert store.update("a", only_if_owner="one", progress=9).progress == 9


def test_of_many_that_end_a_job_one_does(store):
    store.add(record("a", webhook="http://x"))
    start = threading.Barrier(8)

    def end(number):
        start.wait(10)
        return store.update("a", status="failed", completed_at=float(number)) is not None

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(end, range(8))) == 1
    with store.database.read() as connection:
        assert len(connection.execute(select(webhooks)).all()) == 1


def test_what_nobody_has_is_claimed_once_and_in_order(address, open_database):
    """Leases: the dead server's work goes to one of those that want it, the living one's does not.

    Over two connections to one database, but where that is in memory.
    """
    database = open_database(address)
    other = database if database.in_memory else open_database(address)
    stores = [SqlJobStore(database), SqlJobStore(other)]
    names = [f"j{number:02d}" for number in range(20)]
    for number, name in enumerate(names):
        stores[0].add(record(name, owner="dead", lease_until=5.0, created_at=float(number)))
    stores[0].add(record("alive", owner="living", lease_until=50.0))
    stores[0].add(record("free", owner=None, lease_until=None, created_at=99.0))
    stores[0].add(record("another", model="other", lease_until=1.0))
    stores[0].add(record("over", status="completed", lease_until=1.0))
    assert stores[0].claim("x", "m", now=4.0, lease_until=9.0, limit=0) == []
    start = threading.Barrier(4)

    def claim(number):
        start.wait(10)
        claimed = []
        while got := stores[number % 2].claim(f"s{number}", "m", 20.0, 35.0, 3):
            claimed += [r.id for r in got]
            assert all(r.owner == f"s{number}" for r in got)
        return claimed

    with ThreadPoolExecutor(4) as pool:
        shares = list(pool.map(claim, range(4)))
    assert sorted(name for share in shares for name in share) == sorted([*names, "free"])
    assert all(share == sorted(share, key=lambda n: (n == "free", n)) for share in shares)
    assert stores[0].get("alive").owner == "living"
    assert {r.id for r in stores[1].renew("living", 99.0)} == {"alive"}
    assert stores[0].get("alive").lease_until == 99.0
    assert stores[0].disown("living") == 1
    assert stores[0].get("alive").owner is None


def test_what_nobody_is_to_do_any_more_is_claimed_of_any_model(store):
    gone = {"owner": "dead", "lease_until": 5.0, "status": "in_progress"}
    store.add(record("cancelled", model="x", cancel_requested=True, **gone))
    store.add(record("late", model="y", deadline=9.0, **gone))
    store.add(record("waits", model="y", deadline=11.0, **gone))
    alive = gone | {"owner": "living", "lease_until": 50.0}
    store.add(record("alive", model="x", deadline=9.0, cancel_requested=True, **alive))
    ended = store.claim_ended("one", 10.0, 25.0)
    assert {r.id for r in ended} == {"cancelled", "late"}
    assert {r.owner for r in ended} == {"one"}
    assert store.claim_ended("two", 10.0, 25.0) == []
    assert (store.get("waits").status, store.get("waits").owner) == ("queued", "dead")
    assert (store.get("alive").status, store.get("alive").owner) == ("in_progress", "living")


def test_a_key_names_one_request(store):
    key = IdempotencyKey("k", "print")
    assert store.add(record("a"), key).id == "a"
    assert store.add(record("b"), key).id == "a"
    assert store.get("b") is None
    assert store.add(record("c"), IdempotencyKey("k", "print", scope="other client")).id == "c"
    with pytest.raises(KeyReused, match="another request"):
        store.add(record("d"), IdempotencyKey("k", "another"))
    assert store.get("d") is None
    start = threading.Barrier(8)

    def add(number):
        start.wait(10)
        return store.add(record(f"n{number}"), IdempotencyKey("race", "print")).id

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(add, range(8)))) == 1
    store.update("a", status="completed", expires_at=1.0)
    assert [r.id for r in store.sweep(2.0)] == ["a"]
    assert store.add(record("e"), IdempotencyKey("k", "another")).id == "e"  # free again


def test_records_expire_and_lists_go_by_age(store):
    for number in range(6):
        kind = "even" if number % 2 == 0 else "odd"
        store.add(record(f"j{number}", kind=kind, created_at=float(number // 2)))
        if number < 4:
            store.update(f"j{number}", status="completed", expires_at=float(number))
    assert [r.id for r in store.list()] == ["j5", "j4", "j3", "j2", "j1", "j0"]
    assert [r.id for r in store.list(kind="odd", newest_first=False)] == ["j1", "j3", "j5"]
    assert [r.id for r in store.list(after="j4", limit=2)] == ["j3", "j2"]
    assert [r.id for r in store.list(after="j4", newest_first=False)] == ["j5"]
    assert store.list(after="gone") == []
    assert sorted(r.id for r in store.sweep(2.0)) == ["j0", "j1", "j2"]
    assert store.sweep(2.0) == []
    assert store.unfinished() == {"j4", "j5"}


def test_a_database_in_memory_stays_bounded(open_database):
    store = SqlJobStore(open_database("sqlite://"), max_finished=5)
    for number in range(20):
        store.add(record(f"j{number:02d}"))
        if number >= 10:
            done = {"completed_at": float(number), "expires_at": 1e9}
            store.update(f"j{number:02d}", status="completed", **done)
    store.sweep(100.0)
    assert [r.id for r in store.list(limit=5, newest_first=False)][:1] == ["j00"]
    assert len(store) == 15  # all that wait, and the five that finished last


# The tables.


def test_tables_are_brought_up_to_date_once_and_data_stays(address, open_database):
    old = open_database(address)
    SqlJobStore(old).add(FULL)
    told = []

    def note(connection):
        connection.execute(text("ALTER TABLE jobs ADD COLUMN note VARCHAR(9)"))

    newer = (note,)
    database = old if old.in_memory else open_database(address, migrations=newer, tell=told.append)
    if old.in_memory:
        with old.write() as connection:
            old.migrations, old.version = newer, 2
            old._bring_up_to_date(connection, told.append)
    assert told == ["job store: tables brought from version 1 to 2"]
    assert database.store_id == old.store_id
    with database.write() as connection:
        connection.execute(text("UPDATE jobs SET note = 'new'"))
    assert SqlJobStore(database).get("a") == FULL
    if not old.in_memory:
        open_database(address, migrations=newer, tell=told.append)
        assert len(told) == 1
        with pytest.raises(InvalidArgument, match="version 2, and this program knows 1"):
            open_database(address)


def test_a_migration_that_fails_leaves_all_as_it_was(tmp_path, open_database):
    url = f"sqlite:///{tmp_path / 'x.sqlite3'}"
    SqlJobStore(open_database(url)).add(FULL)

    def half(connection):
        connection.execute(text("ALTER TABLE jobs ADD COLUMN note VARCHAR(9)"))
        connection.execute(text("SELECT nonsense"))

    with pytest.raises(StoreUnavailable):
        open_database(url, migrations=(half,))
    store = SqlJobStore(open_database(url))
    assert store.get("a") == FULL
    with store.database.read() as connection:
        assert "note" not in connection.execute(text("SELECT * FROM jobs")).keys()  # noqa: SIM118


@pytest.mark.parametrize("url", ["mysql://x/y", "nonsense", "http://x"])
def test_other_addresses_are_refused(url):
    with pytest.raises(InvalidArgument, match="job_store"):
        Database(url)


def test_a_password_is_not_told():
    with pytest.raises(StoreUnavailable) as failure:
        Database("postgresql://u:topsecret@127.0.0.1:1/x")
    assert "topsecret" not in str(failure.value)
    with pytest.raises(InvalidArgument) as refusal:
        Database("mysql://u:topsecret@h/x")
    assert "topsecret" not in str(refusal.value)


# The buffer.


class Counting:
    """A store that counts its writes, and fails when told to."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.writes = 0
        self.broken = False

    def __getattr__(self, name):
        inner = getattr(self.inner, name)

        def call(*args, **kwargs):
            if name in ("add", "update", "delete"):
                if self.broken:
                    raise StoreUnavailable("disk full")
                self.writes += 1
            return inner(*args, **kwargs)

        return call


def test_progress_does_not_wait_for_the_disk(open_database):
    inner = Counting(SqlJobStore(open_database("sqlite://")))
    store = BufferedJobStore(inner)
    store.add(FULL)
    for percent in range(4, 100):
        store.update_later("a", only_if_owner="one", progress=percent)
        assert store.get("a").progress == percent  # seen here at once
    assert inner.writes == 1
    assert inner.get("a").progress == 3
    store.flush()
    assert inner.writes == 2
    assert inner.get("a").progress == 99
    store.update_later("a", status="in_progress")
    assert store.list()[0].status == "in_progress"
    store.update("a", only_if_owner="one", status="completed", progress=100)
    store.update_later("a", progress=50)  # too late
    store.flush()
    assert store.get("a").progress == 100


def test_a_full_disk_costs_nobody_a_picture(open_database):
    """CB-076: what ends with its connection is served; what must survive is refused."""
    inner = Counting(SqlJobStore(open_database("sqlite://")))
    store = BufferedJobStore(inner)
    inner.broken = True
    with pytest.raises(StoreUnavailable):
        store.add(FULL)
    short = record("b", rerun=None)
    store.add(short)
    assert store.get("b") == short
    assert store.update("b", status="completed", expires_at=9.0).final
    assert store.update("b", progress=1) is None
    with pytest.raises(StoreUnavailable):
        store.flush()
    inner.broken = False
    store.flush()
    assert inner.get("b").status == "completed"


def test_an_end_that_could_not_be_written_is_written_later(open_database):
    inner = Counting(SqlJobStore(open_database("sqlite://")))
    store = BufferedJobStore(inner)
    store.add(FULL)
    inner.broken = True
    with pytest.raises(StoreUnavailable):
        store.update("a", only_if_owner="one", status="failed", completed_at=3.0)
    assert store.get("a").status == "failed"
    inner.broken = False
    store.flush()
    assert inner.get("a").status == "failed"
