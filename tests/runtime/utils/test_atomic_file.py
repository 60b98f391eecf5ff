import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sglang.multimodal_gen.runtime.utils.atomic_file import (
    check_output_folder,
    replace_file,
    write_new_file,
)
from sglang.multimodal_gen.runtime.utils.errors import OutputError

WRITERS = [replace_file, write_new_file]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def failing_with(number: int):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("write", WRITERS)
def test_a_file_is_written_and_nothing_else_stays(tmp_path, write):
    assert write(tmp_path / "a.bin", b"data") == tmp_path / "a.bin"
    assert contents(tmp_path) == {"a.bin": b"data"}


@pytest.mark.parametrize("write", WRITERS)
def test_a_file_has_the_permissions_that_the_user_asked_for(tmp_path, write):
    before = os.umask(0o027)
    try:
        write(tmp_path / "a.bin", b"data")
    finally:
        os.umask(before)
    assert (tmp_path / "a.bin").stat().st_mode & 0o777 == 0o640


def test_replacing_puts_new_content_in_place(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"old")
    replace_file(tmp_path / "a.bin", b"new")
    assert contents(tmp_path) == {"a.bin": b"new"}


def test_a_new_file_never_overwrites(tmp_path):
    taken = [write_new_file(tmp_path / "a.tar.gz", bytes([n])).name for n in range(3)]
    assert taken == ["a.tar.gz", "a.tar-2.gz", "a.tar-3.gz"]
    assert contents(tmp_path) == dict(zip(taken, [b"\0", b"\1", b"\2"], strict=True))


def test_a_new_file_never_overwrites_where_there_are_no_hard_links(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", failing_with(errno.EPERM))
    taken = [write_new_file(tmp_path / "a.bin", bytes([n])).name for n in range(2)]
    assert taken == ["a.bin", "a-2.bin"]
    assert contents(tmp_path) == {"a.bin": b"\0", "a-2.bin": b"\1"}


def test_writers_at_the_same_time_take_different_names(tmp_path):
    threads = [
        threading.Thread(target=write_new_file, args=(tmp_path / "a.bin", bytes([n])))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(contents(tmp_path).values()) == [bytes([n]) for n in range(8)]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_fails_leaves_nothing_half_written(tmp_path, monkeypatch, write, number):
    (tmp_path / "a.bin").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", failing_with(number))
    with pytest.raises(OutputError) as raised:
        write(tmp_path / "a.bin", b"new")
    assert str(tmp_path / "a.bin") in str(raised.value)
    assert os.strerror(number) in str(raised.value)
    assert contents(tmp_path) == {"a.bin": b"old"}


def test_a_rename_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    (tmp_path / "a.bin").write_bytes(b"old")
    monkeypatch.setattr(Path, "replace", failing_with(errno.EACCES))
    with pytest.raises(OutputError, match="may write to"):
        replace_file(tmp_path / "a.bin", b"new")
    assert contents(tmp_path) == {"a.bin": b"old"}


def test_a_reserved_name_is_given_back(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", failing_with(errno.ENOTSUP))
    monkeypatch.setattr(Path, "replace", failing_with(errno.EIO))
    with pytest.raises(OutputError):
        write_new_file(tmp_path / "a.bin", b"new")
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("write", WRITERS)
def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch, write):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a.bin", b"new")
    assert contents(tmp_path) == {}


FULL_DISK = """
import sys
from pathlib import Path
from sglang.multimodal_gen.runtime.utils.atomic_file import write_new_file
from sglang.multimodal_gen.runtime.utils.errors import OutputError
try:
    write_new_file(Path(sys.argv[1]), b"x" * 100_000)
except OutputError as error:
    print(error)
"""


def test_the_real_system_refusing_a_large_file_leaves_nothing(tmp_path):
    def small_files_only():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, tmp_path / "a.bin"],
        env={
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "PYTHONDONTWRITEBYTECODE": "1",  # Python would leave byte code cut at the limit
        },
        preexec_fn=small_files_only,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"cannot write '{tmp_path / 'a.bin'}': File too large.")
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("missing/a.bin", "Create the folder first"),
        ("file/a.bin", "A part of the path is a file"),
        ("x" * 300, "Use a name of at most 255 bytes"),
        ("a\0b", "Use another name"),
    ],
)
@pytest.mark.parametrize("write", WRITERS)
def test_a_place_that_cannot_be_written_is_named_with_the_remedy(tmp_path, write, name, remedy):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match=remedy):
        write(tmp_path / name, b"new")
    assert contents(tmp_path) == {"file": b""}


def test_replacing_a_folder_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="A folder has that name"):
        replace_file(tmp_path / "folder", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_an_output_folder_is_made_and_left_empty(tmp_path):
    folder = check_output_folder(tmp_path / "a/b")
    assert list(folder.iterdir()) == []
    assert check_output_folder(folder) == folder


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_in_the_way_of_the_output_folder_is_named(tmp_path, place):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError) as raised:
        check_output_folder(tmp_path / place)
    assert str(raised.value).startswith(f"cannot use the output folder '{tmp_path / place}': ")
    assert "choose another folder" in str(raised.value).lower()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_that_only_looks_writable_is_refused(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "open", failing_with(number))
    with pytest.raises(OutputError, match=os.strerror(number)):
        check_output_folder(tmp_path)


def test_a_folder_of_the_kernel_is_refused():
    with pytest.raises(OutputError, match="cannot use the output folder '/proc/self/fdinfo'"):
        check_output_folder(Path("/proc/self/fdinfo"))
