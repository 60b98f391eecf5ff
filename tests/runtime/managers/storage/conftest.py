"""Databases to test with: SQLite in memory and on disk, and a PostgreSQL that is started here."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang.multimodal_gen.runtime.managers.storage.database import Database


def postgres_program(name: str) -> str | None:
    """A program of PostgreSQL, on the PATH or where Debian puts it."""
    found = shutil.which(name)
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    return found or (str(places[0]) if places else None)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of a PostgreSQL of our own, on loopback and a free port."""
    programs = [postgres_program(name) for name in ("initdb", "pg_ctl")]
    if None in programs:
        pytest.skip("no PostgreSQL here: apt-get install postgresql")
    initdb, pg_ctl = programs
    user = _other_user() if os.getuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="sglang-pg-", dir="/tmp"))
    if user is not None:
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)

    def run(*command: str) -> None:
        as_user = [] if user is None else ["setpriv", f"--reuid={user}", "--clear-groups", "--"]
        log = subprocess.run(
            [*as_user, *command], capture_output=True, text=True, timeout=60, check=False,
            cwd=folder,
        )  # fmt: skip
        assert log.returncode == 0, log.stdout + log.stderr

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = str(folder / "data")
    run(initdb, "-D", data, "-A", "trust", "-U", "sglang", "-N")
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -F"
    run(pg_ctl, "-D", data, "-o", options, "-l", str(folder / "log"), "-w", "start")
    try:
        yield f"postgresql://sglang@127.0.0.1:{port}/postgres"
    finally:
        run(pg_ctl, "-D", data, "-m", "immediate", "-w", "stop")
        shutil.rmtree(folder, ignore_errors=True)


def _other_user() -> str:
    """PostgreSQL does not run as root."""
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in names)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def address(request, tmp_path) -> str:
    """A database without tables."""
    if request.param == "memory":
        return "sqlite://"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'db' / 'jobs.sqlite3'}"
    url = request.getfixturevalue("postgres")
    name = f"t{os.urandom(6).hex()}"
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
    return url.rpartition("/")[0] + f"/{name}"


@pytest.fixture
def open_database() -> Iterator[Callable[..., Database]]:
    """Opens databases, and closes them."""
    opened: list[Database] = []

    def run(*args, **kwargs) -> Database:
        opened.append(Database(*args, **kwargs))
        return opened[-1]

    yield run
    for database in opened:
        database.close()
