from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Iterator

import pytest

from sglang.multimodal_gen.runtime.managers.storage import blob_folder
from sglang.multimodal_gen.runtime.managers.storage.blob_folder import BlobFolder
from sglang.multimodal_gen.runtime.managers.storage.shared_files import SharedFileStore
from sglang.multimodal_gen.runtime.utils.errors import (
    InvalidArgument,
    OutputError,
    StoreUnavailable,
)


@pytest.fixture(scope="session")
def s3() -> Iterator[dict]:
    """Options of a bucket ``pictures`` on moto's server."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    account = {"aws_access_key_id": "x", "aws_secret_access_key": "y", "region_name": "us-east-1"}
    url = f"http://{host}:{port}"
    client = boto3.client("s3", endpoint_url=url, **account)
    client.create_bucket(Bucket="pictures")
    client.close()
    yield {"key": "x", "secret": "y", "endpoint_url": url,
           "client_kwargs": {"region_name": "us-east-1"}}  # fmt: skip
    server.stop()


@pytest.fixture(params=["local", "s3"])
def folder(request, tmp_path) -> BlobFolder:
    if request.param == "local":
        return BlobFolder(str(tmp_path / "store"))
    options = request.getfixturevalue("s3")
    return BlobFolder(f"s3://pictures/{uuid.uuid4().hex}", options)


@pytest.fixture
def store(folder, open_database) -> SharedFileStore:
    return SharedFileStore(folder.folder("files"), open_database("sqlite://"))


def test_files_are_kept_found_and_removed(store):
    file = store.put(b"\x89PNG...", "image/png", ".png", 100.0)
    assert store.get(file.id) == file
    assert (file.media_type, file.size, file.expires_at) == ("image/png", 7, 100.0)
    assert store.read(file.id) == b"\x89PNG..."
    assert store.folder.names() == [f"{file.id}.png"]
    assert store.delete(file.id)
    assert not store.delete(file.id)
    assert store.get(file.id) is None
    assert store.read(file.id) is None
    assert store.folder.names() == []
    for name in ("../x", "", "a" * 300, "0" * 32):
        assert store.get(name) is None
        assert store.read(name) is None


def test_row_and_bytes_expire_together(store):
    first = store.put(b"1", "image/png", ".png", 10.0)
    second = store.put(b"2", "image/png", ".png", 10.0)
    store.keep_until([second.id], 20.0)
    assert store.sweep(9.0) == 0
    assert store.sweep(10.0) == 1
    assert store.get(first.id) is None
    assert store.folder.names() == [f"{second.id}.png"]
    assert store.get(second.id).expires_at == 20.0


def test_what_no_row_tells_of_is_removed_and_nothing_else(store):
    file = store.put(b"1", "image/png", ".png", 10.0)
    store.folder.write(f"{uuid.uuid4().hex}.png", b"left over")
    store.folder.write("b" * 32 + ".input", b"left over")
    assert store.remove_orphans() == 2
    assert store.read(file.id) == b"1"
    assert store.remove_orphans() == 0


def test_a_server_sees_what_another_stored(folder, tmp_path, open_database):
    url = f"sqlite:///{tmp_path / 'x.sqlite3'}"
    one, two = (SharedFileStore(folder, open_database(url)) for _ in range(2))
    file = one.put(b"shared", "image/webp", ".webp", 10.0)
    assert two.read(file.id) == b"shared"
    assert two.remove_orphans() == 0
    assert two.sweep(11.0) == 1
    assert one.read(file.id) is None


def test_names_of_ours_alone_are_seen(folder):
    folder.write("abc.png", b"x")
    folder.folder("deeper").write("inner.png", b"y")
    assert folder.names() == ["abc.png"]
    for name in ("../x", "/etc/passwd", "A", "", "a/b", ".hidden"):
        with pytest.raises(AssertionError):
            folder.read(name)


def test_a_full_disk_leaves_no_row_and_no_half_file(tmp_path, open_database):
    """CB-076"""
    import resource
    import signal

    store = SharedFileStore(BlobFolder(str(tmp_path / "store")), open_database("sqlite://"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OutputError):
            store.put(b"x" * 100_000, "image/png", ".png", 10.0)
        small = store.put(b"x" * 100, "image/png", ".png", 10.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path / "store") == [f"{small.id}.png"]
    assert store.sweep(100.0) == 1


def test_a_database_that_does_not_answer_is_not_a_full_disk(tmp_path, open_database, monkeypatch):
    store = SharedFileStore(BlobFolder(str(tmp_path / "store")), open_database("sqlite://"))

    def locked(*args):
        raise StoreUnavailable("database is locked")

    with monkeypatch.context() as patched:
        patched.setattr(store.database, "write", locked)
        with pytest.raises(StoreUnavailable):
            store.put(b"x", "image/png", ".png", 10.0)

    def full(*args):
        patched.setattr(store.database, "write", locked)
        raise OutputError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(store.folder, "write", full)
        with pytest.raises(OutputError):
            store.put(b"x", "image/png", ".png", 10.0)
    assert os.listdir(tmp_path / "store") == []


def test_a_store_that_does_not_answer_is_told(s3):
    quickly = {"retries": {"max_attempts": 1}, "connect_timeout": 1}
    nowhere = s3 | {"endpoint_url": "http://127.0.0.1:9", "config_kwargs": quickly}
    folder = BlobFolder("s3://pictures/x", nowhere)
    with pytest.raises(OutputError, match="cannot write"):
        folder.write("a.png", b"x")


def test_a_missing_extra_is_named(monkeypatch):
    def missing(*args, **kwargs):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(blob_folder, "url_to_fs", missing)
    with pytest.raises(InvalidArgument, match=r"sglang-diffusion\[s3\]"):
        BlobFolder("s3://bucket/x")
    monkeypatch.undo()
    with pytest.raises(InvalidArgument, match="file_store"):
        BlobFolder("nonsense://bucket/x")


def test_readers_see_whole_files_while_they_are_replaced(tmp_path):
    folder = BlobFolder(str(tmp_path))
    bodies = [bytes([number]) * 200_000 for number in range(2)]
    folder.write("a.bin", bodies[0])
    stop = threading.Event()

    def write():
        while not stop.is_set():
            for body in bodies:
                folder.write("a.bin", body)

    thread = threading.Thread(target=write)
    thread.start()
    with contextlib.ExitStack() as stack:
        stack.callback(thread.join)
        stack.callback(stop.set)
        for _ in range(100):
            assert folder.read("a.bin") in bodies


def test_what_a_crash_left_half_written_goes_once_it_is_old(tmp_path):
    folder = BlobFolder(str(tmp_path))
    old, young, other = (tmp_path / n for n in (".91aa5f.tmp", ".77bb.tmp", ".mine.txt"))
    for place in (old, young, other):
        place.write_bytes(b"half")
    an_hour_ago = time.time() - 3600
    os.utime(old, (an_hour_ago, an_hour_ago))
    os.utime(other, (an_hour_ago, an_hour_ago))
    assert folder.remove_half_written() == 1
    assert (old.exists(), young.exists(), other.exists()) == (False, True, True)
