from __future__ import annotations

import socket
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select, text
from sqlalchemy.engine import make_url

from sglang.multimodal_gen.runtime.managers.storage import database as module
from sglang.multimodal_gen.runtime.managers.storage.database import REST_SECONDS, Database, jobs
from sglang.multimodal_gen.runtime.utils.errors import StoreUnavailable


def test_it_closes_while_a_thread_reads():
    """The threads of a database in memory share one connection: closed under them, it crashes."""
    database = Database("sqlite://")
    failures = []

    def read():
        try:
            while True:
                with database.read() as connection:
                    connection.execute(select(jobs.c.id)).all()
        except StoreUnavailable as error:  # closed: there are no tables any more
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    database.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert len(failures) == 4


def test_writers_do_not_queue_for_a_database_that_is_locked(tmp_path, open_database, monkeypatch):
    """One waits for the lock; for those behind it, and for the next seconds, its answer holds."""
    monkeypatch.setattr(module, "_BUSY_SECONDS", 0.5)
    now = [100.0]
    place = tmp_path / "jobs.sqlite3"
    database = open_database(f"sqlite:///{place}", clock=lambda: now[0])

    def write(_=None):
        began = time.monotonic()
        try:
            with database.write() as connection:
                connection.execute(text("UPDATE jobs SET progress = 1"))
        except StoreUnavailable:
            return time.monotonic() - began
        return None

    other = sqlite3.connect(place, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(8) as pool:
        waits = list(pool.map(write, range(8)))
    assert 0.4 < max(waits) < 1.5  # one after the other, they were 4 seconds
    assert write() < 0.1
    now[0] += REST_SECONDS
    assert write() > 0.4  # the next one tries
    assert write() < 0.1
    with database.read() as connection:  # readers need no lock
        assert connection.execute(select(jobs.c.id)).all() == []
    other.rollback()
    assert write() < 0.1
    now[0] += REST_SECONDS
    assert write() is None
    assert write() is None
    other.close()


def test_while_one_tries_again_nobody_waits_for_it(tmp_path, open_database, monkeypatch):
    monkeypatch.setattr(module, "_BUSY_SECONDS", 0.5)
    now = [100.0]
    place = tmp_path / "jobs.sqlite3"
    database = open_database(f"sqlite:///{place}", clock=lambda: now[0])
    other = sqlite3.connect(place, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    def write():
        began = time.monotonic()
        with pytest.raises(StoreUnavailable), database.write():
            pass
        return time.monotonic() - began

    write()
    now[0] += REST_SECONDS
    with ThreadPoolExecutor(4) as pool:
        waits = sorted(f.result() for f in [pool.submit(write) for _ in range(4)])
    assert waits[2] < 0.3 < waits[3]
    other.close()


def test_a_statement_that_fails_stops_nobody(open_database):
    database = open_database("sqlite://")
    with pytest.raises(StoreUnavailable), database.write() as connection:
        connection.execute(text("UPDATE nothing SET x = 1"))
    with database.write() as connection:
        connection.execute(text("UPDATE jobs SET progress = 1"))


def test_a_database_that_takes_the_line_and_says_nothing_is_not_waited_for(monkeypatch):
    """A host behind a broken network: whoever needs it must hear of it, and not hang."""
    monkeypatch.setattr(module, "_CONNECT_SECONDS", 2)  # the least that libpq heeds
    errors: list[Exception] = []

    def connect(url: str) -> None:
        try:
            Database(url)
        except StoreUnavailable as error:
            errors.append(error)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://nobody@127.0.0.1:{silent.getsockname()[1]}/none"
        thread = threading.Thread(target=connect, args=(url,), daemon=True)
        thread.start()
        thread.join(8)
        assert not thread.is_alive()
    assert len(errors) == 1


def test_the_database_urls_own_limits_come_first():
    options = module._postgres_options(make_url("postgresql://h/d?connect_timeout=3"))
    assert "connect_timeout" not in options
    assert options["tcp_user_timeout"] > 0
