"""The server's hold on its jobs: the thread that says it lives, and takes over what nobody has."""

from __future__ import annotations

import logging
import threading

from sglang.multimodal_gen.runtime.managers.client_error import client_error
from sglang.multimodal_gen.runtime.managers.jobs import JobRecord
from sglang.multimodal_gen.runtime.managers.kept_inputs import drop_files, files_of
from sglang.multimodal_gen.runtime.managers.service import GenerationService
from sglang.multimodal_gen.runtime.utils.errors import (
    Cancelled,
    DeadlineExceeded,
    DiffusionError,
    StoreUnavailable,
    Unavailable,
)

logger = logging.getLogger(__name__)

_BEATS_PER_LEASE = 5
_MAX_BEAT_SECONDS = 1.0
_INTERRUPTED = {
    "message": "the server stopped while it was at this, and its caller's connection with it",
    "type": "server_error",
    "param": None,
    "code": "interrupted",
}


class JobKeeper:
    """Calls `tick` for as long as the service is open.

    Each job belongs to one server, by a lease that its owner renews. A server that is gone renews
    nothing; when a lease is over, the first server that claims the job has it.
    """

    def __init__(self, service: GenerationService) -> None:
        self.service = service
        self.beat_seconds = min(_MAX_BEAT_SECONDS, service.lease_seconds / _BEATS_PER_LEASE)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="jobs", daemon=True)

    def start(self) -> None:
        """Take up what was interrupted, and begin to beat."""
        self._try()
        self._thread.start()

    def close(self) -> None:
        """Write what waits, and end the thread; unfinished work is left to others at once."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(30.0)
        try:
            self.service.jobs.flush()
        except StoreUnavailable as error:
            logger.warning("%s", error)

    def tick(self) -> None:
        """One beat: write, renew, heed cancels, claim.

        Raises:
            StoreUnavailable: the store does not answer; the next beat tries again.
        """
        service = self.service
        now = service.clock()
        service.jobs.flush()
        before = service.live
        mine = {r.id: r for r in service.jobs.renew(service.owner, now + service.lease_seconds)}
        for record in mine.values():
            if record.cancel_requested:
                service.cancel(record.id)
            watcher = before.get(record.id)
            if watcher is not None and watcher.started_at is not None and record.status == "queued":
                watcher.shown_again()  # another server thought that nobody is at it
        for job_id, watcher in before.items():
            if watcher.record.rerun is not None and job_id not in mine and job_id in service.live:
                self._lost(job_id)
        for record in service.jobs.claim_ended(service.owner, now, now + service.lease_seconds):
            self._end_unheld(record)
        if service.scheduler.takes_work:
            self._claim(now)

    def _lost(self, job_id: str) -> None:
        """Another server took a job over while this one did not renew its lease in time."""
        record = self.service.jobs.get(job_id)
        if record is None or record.owner in (None, self.service.owner):
            return  # it is being written, or was handed back
        logger.warning("job %s is another server's by now", job_id)
        self.service.scheduler.cancel(job_id, Cancelled("another server took it over"))

    def _claim(self, now: float) -> None:
        service = self.service
        scheduler = service.scheduler
        room = scheduler.limits.max_waiting - scheduler.status.waiting
        lease = now + service.lease_seconds
        for record in service.jobs.claim(service.owner, service.served_name, now, lease, room):
            self._take_up(record)

    def _take_up(self, record: JobRecord) -> None:
        service = self.service
        if record.rerun is None:
            self._end(record, status="failed", error=_INTERRUPTED)
            return
        if record.cancel_requested:
            self._end(record, status="cancelled")
            return
        changes = {"status": "queued", "attempts": record.attempts + 1, "resumed_at_step": None}
        taken = service.jobs.update(record.id, only_if_owner=service.owner, **changes)
        if taken is None:
            return
        logger.info("job %s goes on", record.id)
        try:
            service.resume(taken)
        except Unavailable:
            free = {"owner": None, "lease_until": None, "attempts": record.attempts}
            service.jobs.update(record.id, only_if_owner=service.owner, **free)
        except DiffusionError as error:
            self._end(taken, status="failed", error=client_error(error).as_object())

    def _end_unheld(self, record: JobRecord) -> None:
        """End what no server has, of whatever model: it was cancelled, or its time is over."""
        if record.cancel_requested:
            self._end(record, status="cancelled")
            return
        late = DeadlineExceeded("the request's own time limit passed while no server was at it")
        self._end(record, status="failed", error=client_error(late).as_object())

    def _end(self, record: JobRecord, **final: object) -> None:
        """End a job that does not come into line again."""
        service = self.service
        now = service.clock()
        final |= {"completed_at": now, "expires_at": now + service.job_ttl, "results": ()}
        written = service.jobs.update(record.id, only_if_owner=service.owner, **final)
        if written is not None:
            drop_files(service.files, files_of(record))
            if service.checkpoints is not None and record.rerun is not None:
                most = len(record.rerun["settings"]["seed"])  # a part makes one output at least
                service.checkpoints.drop(record.id, range(most))

    def _try(self) -> None:
        try:
            self.tick()
        except StoreUnavailable as error:
            logger.warning("%s", error)

    def _loop(self) -> None:
        while not self._stop.wait(self.beat_seconds):
            self._try()
