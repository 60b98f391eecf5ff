"""Results that are fetched later, by an id that the server made."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from sglang.multimodal_gen.runtime.managers.visit import current_client
from sglang.multimodal_gen.runtime.utils.atomic_file import check_output_folder, write_new_file
from sglang.multimodal_gen.runtime.utils.errors import OutputError


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that can be fetched until ``expires_at`` (seconds since 1970)."""

    id: str
    media_type: str
    size: int
    expires_at: float
    client: str | None = field(default_factory=current_client)
    """Whose it is, where clients have keys (`visit`)."""


class FileStore(Protocol):
    """Where results are kept. Ids are made here and looked up in a table: they are never paths."""

    def put(self, data: bytes, media_type: str, suffix: str, expires_at: float) -> StoredFile:
        """Keep a file.

        Raises:
            OutputError: it cannot be written; nothing half-written stays.
            StoreUnavailable: what is known about files cannot be written now.
        """
        ...

    def get(self, file_id: str) -> StoredFile | None:
        """What is known about a file; None where there is none (any more)."""
        ...

    def read(self, file_id: str) -> bytes | None:
        """The bytes of a file; None where there is none."""
        ...

    def keep_until(self, file_ids: Sequence[str], expires_at: float) -> None:
        """Change when files expire."""
        ...

    def delete(self, file_id: str) -> bool:
        """Remove a file; whether there was one."""
        ...

    def sweep(self, now: float) -> int:
        """Remove what expired before ``now``; how many that were."""
        ...

    def close(self) -> None:
        """Let go; a store that was only lent removes what it has."""
        ...


class LocalFileStore:
    """Files in one folder. Without a folder: in a private one, removed by `close`.

    Raises:
        OutputError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._temporary = folder is None
        self._folder = None if folder is None else check_output_folder(folder)
        self._files: dict[str, tuple[StoredFile, Path]] = {}
        self._lock = threading.Lock()

    def put(self, data: bytes, media_type: str, suffix: str, expires_at: float) -> StoredFile:
        """Keep a file."""
        file = StoredFile(uuid.uuid4().hex, media_type, len(data), expires_at)
        path = write_new_file(self._place() / f"{file.id}{suffix}", data)
        with self._lock:
            self._files[file.id] = (file, path)
        return file

    def get(self, file_id: str) -> StoredFile | None:
        """What is known about a file."""
        with self._lock:
            return self._files[file_id][0] if file_id in self._files else None

    def read(self, file_id: str) -> bytes | None:
        """The bytes of a file."""
        with self._lock:
            known = self._files.get(file_id)
        if known is None:
            return None
        try:
            return known[1].read_bytes()
        except OSError:  # somebody else removed it
            self.delete(file_id)
            return None

    def keep_until(self, file_ids: Sequence[str], expires_at: float) -> None:
        """Change when files expire."""
        with self._lock:
            for file_id in file_ids:
                if file_id in self._files:
                    file, path = self._files[file_id]
                    changed = dataclasses.replace(file, expires_at=expires_at)
                    self._files[file_id] = (changed, path)

    def delete(self, file_id: str) -> bool:
        """Remove a file."""
        with self._lock:
            known = self._files.pop(file_id, None)
        if known is None:
            return False
        with contextlib.suppress(OSError):
            known[1].unlink()
        return True

    def sweep(self, now: float) -> int:
        """Remove what expired."""
        with self._lock:
            gone = [file.id for file, _ in self._files.values() if file.expires_at <= now]
        return sum(self.delete(file_id) for file_id in gone)

    def close(self) -> None:
        """Remove a private folder."""
        if self._temporary and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _place(self) -> Path:
        """The folder; a private one is made when it is needed: nothing else needs a disk."""
        with self._lock:
            if self._folder is None:
                try:
                    self._folder = Path(tempfile.mkdtemp(prefix="sglang-files-"))
                except OSError as error:
                    raise OutputError(f"no place for files ({error.strerror})") from error
            return self._folder
