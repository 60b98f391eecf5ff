"""Where the states of interrupted jobs lie, and the thread that writes them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from sglang.multimodal_gen.runtime.managers.storage.blob_folder import BlobFolder
from sglang.multimodal_gen.runtime.pipelines_core.loop_state import LoopState, NotKeepable
from sglang.multimodal_gen.runtime.utils.errors import OutputError

logger = logging.getLogger(__name__)

_SUFFIX = ".safetensors"


class CheckpointStore:
    """The last state of each part of each job, in a folder that the servers share.

    `save` returns at once. A state that is still to be written when the next one comes is not
    written at all: the disk may be slower than the steps.
    """

    def __init__(self, folder: BlobFolder) -> None:
        self.folder = folder
        self.written = 0
        self._waiting: dict[str, LoopState] = {}
        self._dropped: set[str] = set()
        self._busy: str | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._write_all, name="checkpoints", daemon=True)
        self._thread.start()

    def save(self, job_id: str, part: int, state: LoopState) -> None:
        """Keep a state, in place of the part's last one."""
        with self._changed:
            self._waiting[_name(job_id, part)] = state
            self._changed.notify_all()

    def load(self, job_id: str, part: int) -> LoopState | None:
        """The last state of a part; None where there is none, or none that can be read."""
        try:
            data = self.folder.read(_name(job_id, part))
            return None if data is None else LoopState.from_bytes(data)
        except (OutputError, NotKeepable) as error:
            logger.warning("job %s begins again: %s", job_id, error)
            return None

    def drop(self, job_id: str, parts: Iterable[int]) -> None:
        """Forget a job's states; those that are being written go as soon as they are."""
        for name in [_name(job_id, part) for part in parts]:
            with self._changed:
                self._waiting.pop(name, None)
                if self._busy == name:
                    self._dropped.add(name)
                    continue
            self.folder.delete(name)

    def remove_orphans(self, unfinished: Callable[[], set[str]]) -> int:
        """Remove the states of all jobs but ``unfinished`` ones; how many that were."""
        self.folder.remove_half_written()
        names = self.folder.names()  # before the records: a new state has its record already
        keep = unfinished()
        orphans = [name for name in names if name.partition("-")[0] not in keep]
        return sum(self.folder.delete(name) for name in orphans)

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until all is written; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._busy is None, timeout)

    def close(self) -> None:
        """Write what waits, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(30.0)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                name = next(iter(self._waiting))
                state = self._waiting.pop(name)
                self._busy = name
            try:
                self.folder.write(name, state.to_bytes())
                self.written += 1
            except OutputError as error:  # a full disk costs the state, not the job
                logger.warning("a job's state was not kept: %s", error)
            while not self._done_with(name):
                self.folder.delete(name)

    def _done_with(self, name: str) -> bool:
        """Whether a written state may stay; if it was dropped meanwhile, it is to be deleted."""
        with self._changed:
            if name in self._dropped:
                self._dropped.discard(name)
                return False
            self._busy = None
            self._changed.notify_all()
            return True


def _name(job_id: str, part: int) -> str:
    return f"{job_id}-{part}{_SUFFIX}"
