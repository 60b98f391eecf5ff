"""A folder of whole files, on a local disk or in an object store."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from sglang.multimodal_gen.runtime.utils.atomic_file import check_output_folder, replace_file
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, OutputError

_NAME = re.compile(r"[0-9a-z][0-9a-z.-]{0,120}")


class BlobFolder:
    """Files by name in ``place``: a folder, or an address that fsspec knows, such as s3://....

    A file is whole or absent: locally it gets its name last, and an object store does the same.
    Names are made by the server, and checked here again.

    Raises:
        InvalidArgument: nothing serves the address, or an extra is missing.
        OutputError: the folder cannot be made or written.
    """

    def __init__(self, place: str, options: dict[str, Any] | None = None) -> None:
        try:
            self._fs, root = url_to_fs(place, **(options or {}))
        except ImportError as error:
            kind = place.partition(":")[0]
            problem = f"needs the extra {kind!r}: pip install 'sglang-diffusion[{kind}]'"
            raise InvalidArgument("file_store", place, problem) from error
        except ValueError as error:
            raise InvalidArgument("file_store", place, f"is no folder or address ({error})") from (
                error
            )
        self.root = str(root).rstrip("/")
        self.is_local = isinstance(self._fs, LocalFileSystem)
        if self.is_local:
            check_output_folder(Path(self.root))

    def folder(self, name: str) -> BlobFolder:
        """A folder inside, made if it is missing."""
        inner = object.__new__(BlobFolder)
        inner._fs, inner.is_local = self._fs, self.is_local
        inner.root = f"{self.root}/{_checked(name)}"
        if inner.is_local:
            check_output_folder(Path(inner.root))
        return inner

    def write(self, name: str, data: bytes) -> None:
        """Put a file, in place of one of that name.

        Raises:
            OutputError: it cannot be written; nothing half-written stays.
        """
        path = f"{self.root}/{_checked(name)}"
        if self.is_local:
            replace_file(Path(path), data)
            return
        with self._translated(f"write {name!r}"):
            self._fs.pipe_file(path, data)

    def read(self, name: str) -> bytes | None:
        """The bytes of a file; None where there is none.

        Raises:
            OutputError: the store does not answer.
        """
        with self._translated(f"read {name!r}"):
            try:
                return self._fs.cat_file(f"{self.root}/{_checked(name)}")
            except FileNotFoundError:
                return None

    def delete(self, name: str) -> bool:
        """Remove a file; whether that is done: one that is gone already counts as removed."""
        try:
            self._fs.rm_file(f"{self.root}/{_checked(name)}")
        except FileNotFoundError:
            return True
        except _FAULTS:
            return False
        return True

    def names(self) -> list[str]:
        """The names of all files here; not of folders, and not those that are no names of ours."""
        with self._translated("list the files"):
            try:
                self._fs.invalidate_cache()
                found = self._fs.ls(self.root, detail=True)
            except FileNotFoundError:
                return []
        files = [str(entry["name"]).rpartition("/")[2] for entry in found
                 if entry["type"] == "file"]  # fmt: skip
        return [name for name in files if _NAME.fullmatch(name)]

    def remove_half_written(self, older_than: float = 600.0) -> int:
        """Remove what a crash left in the middle of a `write`, if that was so many seconds ago: a
        younger one may be another server's that is being written. Returns how many those were."""
        if not self.is_local:
            return 0  # object stores show whole files only
        gone = 0
        for place in Path(self.root).glob(".*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - place.stat().st_mtime >= older_than:
                    place.unlink()
                    gone += 1
        return gone

    @contextlib.contextmanager
    def _translated(self, action: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except _FAULTS as error:
            raise OutputError(f"cannot {action} in {self.root!r}: {error}") from error


def _faults() -> tuple[type[Exception], ...]:
    """What file systems raise: s3fs turns most of its library's errors into OSError, not all."""
    faults: list[type[Exception]] = [OSError]
    with contextlib.suppress(ImportError):
        from botocore.exceptions import BotoCoreError, ClientError

        faults += [BotoCoreError, ClientError]
    return tuple(faults)


_FAULTS = _faults()


def _checked(name: str) -> str:
    assert _NAME.fullmatch(name), f"not a name of ours: {name!r}"
    return name
