"""A server's name among those of one state folder, which it keeps when it is started again."""

from __future__ import annotations

import uuid
from pathlib import Path

from filelock import FileLock, Timeout

from sglang.multimodal_gen.runtime.utils.atomic_file import replace_file
from sglang.multimodal_gen.runtime.utils.errors import OutputError

_MOST_SERVERS = 1024


class ServerSlot:
    """The first free place in ``folder``, held by a lock that goes with the process.

    ``owner`` is the place's name. That the lock is free says that whoever had the place before is
    gone, however it ended: its jobs need not wait for their lease.

    Raises:
        OutputError: the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock, self.owner = self._take(folder)
        except OSError as error:
            raise OutputError(f"cannot use {str(folder)!r}: {error.strerror}") from error

    def close(self) -> None:
        """Give the place free."""
        self._lock.release()

    @staticmethod
    def _take(folder: Path) -> tuple[FileLock, str]:
        for number in range(_MOST_SERVERS):
            lock = FileLock(folder / f"{number}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            name = folder / f"{number}.name"
            if not name.exists():
                replace_file(name, uuid.uuid4().hex.encode())
            return lock, name.read_text().strip()
        raise OutputError(f"{_MOST_SERVERS} servers use {str(folder)!r} already")
