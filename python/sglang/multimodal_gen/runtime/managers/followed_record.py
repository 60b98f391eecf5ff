"""The end of a job that another server runs, or ran: read from its record."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from sglang.multimodal_gen.runtime.managers.job_progress import FinishedJob
from sglang.multimodal_gen.runtime.managers.jobs import JobRecord, JobStore
from sglang.multimodal_gen.runtime.utils.errors import (
    Cancelled,
    FailedBefore,
    StoreUnavailable,
    Unavailable,
)

_LOOK_SECONDS = 0.5


class FollowedRecord:
    """``result`` ends as the record does; a thread looks until then, where it has not ended yet."""

    def __init__(self, store: JobStore, record: JobRecord) -> None:
        self.result: Future[FinishedJob] = Future()
        self.result.set_running_or_notify_cancel()
        self._store = store
        self._id = record.id
        self._began = False
        self._wait = threading.Event()
        if not self._told(record):
            threading.Thread(target=self._follow, name="followed job", daemon=True).start()

    def _follow(self) -> None:
        while True:
            self._wait.wait(_LOOK_SECONDS)
            try:
                record = self._store.get(self._id)
            except StoreUnavailable as error:
                self.result.set_exception(error)
                return
            if self._told(record):
                return

    def _told(self, record: JobRecord | None) -> bool:
        """Pass the end on; False while there is none."""
        if record is None and not self._began:
            # Its server had no room for it, which only that one's own client was told.
            self.result.set_exception(Unavailable("the job was withdrawn before it began"))
        elif record is None:
            self.result.set_exception(Cancelled("deleted"))
        elif record.status == "completed":
            self.result.set_result(_finished(record))
        elif record.status == "cancelled":
            self.result.set_exception(Cancelled("cancelled"))
        elif record.status == "failed":
            self.result.set_exception(FailedBefore(record.error or {}))
        else:
            self._began = self._began or record.started_at is not None
            return False
        return True


def _finished(record: JobRecord) -> FinishedJob:
    began = record.created_at if record.started_at is None else record.started_at
    ended = began if record.completed_at is None else record.completed_at
    return FinishedJob(
        id=record.id,
        images=(),
        videos=(),
        results=record.results,
        settings=record.settings,
        warnings=record.warnings,
        queue_seconds=began - record.created_at,
        run_seconds=ended - began,
        timings={},
        peak_memory_mb=0.0,
    )
