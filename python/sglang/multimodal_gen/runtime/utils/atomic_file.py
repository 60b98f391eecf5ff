"""Files that are whole or absent.

A file is written under a temporary name in its own folder, flushed to the disk and then given its
name in one step. Whatever fails on the way (full disk, missing permission, Ctrl-C), the temporary
file goes and the name is as it was.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from sglang.multimodal_gen.runtime.utils.errors import OutputError

MAX_NAME_BYTES = 255  # of one path component, on every file system in common use

# Errors of `os.link` on file systems that have no hard links (FAT, some network mounts).
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_REMEDIES = {
    errno.ENOSPC: "Free some space there or choose another folder.",
    errno.EDQUOT: "Your quota is used up: free some space there or choose another folder.",
    errno.EFBIG: "The file is larger than this system allows here: choose another folder.",
    errno.EACCES: "Choose a folder that you may write to.",
    errno.EPERM: "Choose a folder that you may write to.",
    errno.EROFS: "Choose a folder on a file system that can be written.",
    errno.ENOTDIR: "A part of the path is a file: choose another folder.",
    errno.EEXIST: "A file of that name is in the way: choose another folder.",
    errno.EISDIR: "A folder has that name: choose another name.",
    errno.ENAMETOOLONG: f"Use a name of at most {MAX_NAME_BYTES} bytes.",
    errno.ENOENT: "Create the folder first or choose another one.",
}


def replace_file(path: Path, data: bytes) -> Path:
    """Write ``data`` to ``path``, in place of what was there; returns ``path``.

    Raises:
        OutputError: it could not be written; the old content, if any, is untouched.
    """
    with _translated(path), _temporary(path, data) as temporary:
        temporary.replace(path)
        _sync_folder(path.parent)
    return path


def write_new_file(path: Path, data: bytes) -> Path:
    """Write ``data`` to ``path`` or, where that exists, to ``name-2.ext``, ``name-3.ext``, ...

    Never overwrites, also when two processes ask for the same name at once.

    Returns:
        The path that was taken.

    Raises:
        OutputError: it could not be written; nothing is left behind.
    """
    with _translated(path), _temporary(path, data) as temporary:
        taken = next(name for name in _candidates(path) if _claim(temporary, name))
        _sync_folder(path.parent)
    return taken


def write_new_folder(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write ``files`` into a new folder ``path`` or, where that exists, ``path-2``, ``path-3``, ...

    The folder is whole or absent: it gets its name when its last file is on the disk.

    Returns:
        The path that was taken.

    Raises:
        OutputError: it could not be written; nothing is left behind.
    """
    hidden = path.with_name(f".{secrets.token_hex(8)}.tmp")
    with _translated(path):
        try:
            hidden.mkdir()
            for name, data in files.items():
                write_new_file(hidden / name, data)
            taken = next(name for name in _candidates(path) if _claim_folder(hidden, name))
            _sync_folder(path.parent)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    return taken


def _claim_folder(hidden: Path, name: Path) -> bool:
    """Give the folder its name, unless that is taken (an empty folder gives way)."""
    try:
        hidden.rename(name)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            return False
        raise
    return True


def check_output_folder(folder: Path) -> Path:
    """Make sure that files can be written into ``folder``, creating it if it is missing.

    For use before long work: a minute of computing should not end on a folder that cannot take the
    result.

    Raises:
        OutputError: the folder cannot be made or written; names it and the remedy.
    """
    with _translated(folder, action="use the output folder"):
        folder.mkdir(parents=True, exist_ok=True)
        # Permission bits lie (root, read-only mounts, quotas): only writing tells.
        with _temporary(folder / "probe", b"\0"):
            pass
    return folder


@contextlib.contextmanager
def _temporary(path: Path, data: bytes) -> Iterator[Path]:
    """A hidden file beside ``path`` that holds ``data``, on the disk; gone afterwards."""
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    # Not `tempfile`: its files are readable by their owner only, and the result keeps that mode.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _candidates(path: Path) -> Iterator[Path]:
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")
        number += 1


def _claim(temporary: Path, name: Path) -> bool:
    """Give the temporary file its name, unless the name is taken."""
    try:
        os.link(temporary, name)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _claim_without_links(temporary, name)
    return True


def _claim_without_links(temporary: Path, name: Path) -> bool:
    """Reserve the name with an empty file, then move the full one over it."""
    try:
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        return False
    try:
        temporary.replace(name)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
    return True


def _sync_folder(folder: Path) -> None:
    """Put the new name itself on the disk, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # network and FUSE mounts refuse to sync a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _translated(path: Path, action: str = "write") -> Iterator[None]:
    """Turn the system's error into one that names the path and what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = _REMEDIES.get(error.errno or 0, "Choose another folder.")
        raise OutputError(f"cannot {action} {str(path)!r}: {reason}. {remedy}") from error
    except ValueError as error:  # a NUL in the path
        raise OutputError(f"cannot {action} {str(path)!r}: {error}. Use another name.") from error
