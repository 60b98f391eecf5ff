"""Files that several servers keep together: bytes in a folder or an object store, a table of them.

The row comes before the bytes and goes before them: whatever lies in the folder without a row is
left over from a server that ended in between, and may be removed at any time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import uuid
from collections.abc import Sequence

from sqlalchemy import delete, insert, select, update

from sglang.multimodal_gen.runtime.managers.file_store import StoredFile
from sglang.multimodal_gen.runtime.managers.storage.blob_folder import BlobFolder
from sglang.multimodal_gen.runtime.managers.storage.database import Database, files
from sglang.multimodal_gen.runtime.utils.errors import StoreUnavailable

logger = logging.getLogger(__name__)

_SWEPT_AT_ONCE = 1000


class SharedFileStore:
    """A `FileStore` in ``folder``, which is this database's alone, with its table in it."""

    def __init__(self, folder: BlobFolder, database: Database) -> None:
        self.folder = folder
        self.database = database

    def put(self, data: bytes, media_type: str, suffix: str, expires_at: float) -> StoredFile:
        """Keep a file."""
        file = StoredFile(uuid.uuid4().hex, media_type, len(data), expires_at)
        name = f"{file.id}{suffix}"
        with self.database.write() as connection:
            connection.execute(insert(files), dataclasses.asdict(file) | {"name": name})
        try:
            self.folder.write(name, data)
        except BaseException:
            with contextlib.suppress(StoreUnavailable):  # the folder's fault is what is told
                self._forget([file.id])
            raise
        return file

    def get(self, file_id: str) -> StoredFile | None:
        """What is known about a file."""
        row = self._row(file_id)
        return None if row is None else row[0]

    def read(self, file_id: str) -> bytes | None:
        """The bytes of a file; None too while another server still writes them."""
        row = self._row(file_id)
        return None if row is None else self.folder.read(row[1])

    def keep_until(self, file_ids: Sequence[str], expires_at: float) -> None:
        """Change when files expire."""
        with self.database.write() as connection:
            change = update(files).where(files.c.id.in_(list(file_ids)))
            connection.execute(change.values(expires_at=expires_at))

    def delete(self, file_id: str) -> bool:
        """Remove a file."""
        row = self._row(file_id)
        if row is None:
            return False
        self._forget([file_id])
        self.folder.delete(row[1])
        return True

    def sweep(self, now: float) -> int:
        """Remove what expired."""
        query = select(files.c.id, files.c.name).where(files.c.expires_at <= now)
        with self.database.read() as connection:
            gone = connection.execute(query.limit(_SWEPT_AT_ONCE)).all()
        if gone:
            self._forget([file_id for file_id, _ in gone])
        for _, name in gone:
            self.folder.delete(name)
        return len(gone)

    def remove_orphans(self) -> int:
        """Remove what no row tells of; how many files that were."""
        self.folder.remove_half_written()
        names = set(self.folder.names())  # before the rows: a new file has its row already
        with self.database.read() as connection:
            known = set(connection.execute(select(files.c.name)).scalars())
        orphans = names - known
        for name in orphans:
            self.folder.delete(name)
        if orphans:
            logger.info("removed %d files that nobody knows of", len(orphans))
        return len(orphans)

    def close(self) -> None:
        """Nothing to do: the files stay."""

    def _forget(self, file_ids: Sequence[str]) -> None:
        with self.database.write() as connection:
            connection.execute(delete(files).where(files.c.id.in_(list(file_ids))))

    def _row(self, file_id: str) -> tuple[StoredFile, str] | None:
        with self.database.read() as connection:
            found = connection.execute(select(files).where(files.c.id == file_id)).mappings()
            row = found.first()
        if row is None:
            return None
        values = {f.name: row[f.name] for f in dataclasses.fields(StoredFile)}
        return StoredFile(**values), row["name"]
