"""The server's hold on its jobs: the thread that says it lives, and takes over what nobody has."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from sglang.multimodal_gen.runtime.managers.client_error import client_error
from sglang.multimodal_gen.runtime.managers.jobs import JobRecord
from sglang.multimodal_gen.runtime.managers.kept_inputs import files_of
from sglang.multimodal_gen.runtime.managers.service import GenerationService
from sglang.multimodal_gen.runtime.utils.errors import (
    Cancelled,
    DeadlineExceeded,
    DiffusionError,
    InputLost,
    InternalError,
    OutputError,
    StoreUnavailable,
    Unavailable,
)

logger = logging.getLogger(__name__)

_BEATS_PER_LEASE = 5
_MAX_BEAT_SECONDS = 1.0
MOST_TRIES = 60
"""How often a job's inputs are tried, a few beats apart, until the job fails for want of them."""
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
        self._unheld: set[str] = set()
        self._tries: Counter[str] = Counter()
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
        self._strays(mine)
        for record in service.jobs.claim_ended(service.owner, now, now + service.lease_seconds):
            self._end_unheld(record)
        if service.scheduler.takes_work:
            self._claim()

    def _lost(self, job_id: str) -> None:
        """Another server took a job over while this one did not renew its lease in time, or
        deleted it."""
        in_line = self.service.scheduler.has(job_id)  # so there was a record
        record = self.service.jobs.get(job_id)
        if record is None:
            if in_line:
                self.service.scheduler.cancel(job_id, Cancelled("deleted"))
            return
        if record.owner in (None, self.service.owner):
            return  # it is being written, or was handed back
        logger.warning("job %s is another server's by now", job_id)
        self.service.scheduler.cancel(job_id, Cancelled("another server took it over"))

    def _strays(self, mine: Iterable[str]) -> None:
        """Let go of what the store says is this server's, and nothing here is at: it was claimed,
        and could not be taken up then. What was seen so at the last beat too is no job that is just
        beginning or ending.
        """
        service = self.service
        seen = {job_id for job_id in mine if job_id not in service.live}
        for job_id in sorted(seen & self._unheld):
            record = service.jobs.get(job_id)  # with an end that the store has not heard of yet
            if record is None or record.final or record.owner != service.owner:
                continue
            if job_id not in service.live:
                free = {"owner": None, "lease_until": None}
                service.jobs.update(job_id, only_if_owner=service.owner, **free)
        self._unheld = seen

    def _claim(self) -> None:
        """Take jobs up one by one, for a beat at most: the leases of the others must be renewed."""
        service = self.service
        scheduler = service.scheduler
        until = service.clock() + self.beat_seconds
        while scheduler.status.waiting < scheduler.limits.max_waiting:
            now = service.clock()
            lease = now + service.lease_seconds
            claimed = service.jobs.claim(service.owner, service.served_name, now, lease, 1)
            if not claimed or not self._take_up(claimed[0]) or service.clock() >= until:
                return

    def _take_up(self, record: JobRecord) -> bool:
        """Begin with a claimed job, or end it; False where there is no place for more now."""
        service = self.service
        if record.rerun is None:
            self._end(record, status="failed", error=_INTERRUPTED)
            return True
        if record.cancel_requested:
            self._end(record, status="cancelled")
            return True
        if record.id in service.live:
            return True  # it never left
        changes = {"status": "queued", "attempts": record.attempts + 1, "resumed_at_step": None}
        taken = service.jobs.update(record.id, only_if_owner=service.owner, **changes)
        if taken is None:
            return True
        logger.info("job %s goes on", record.id)
        try:
            service.resume(taken)
        except Unavailable:
            free = {"owner": None, "lease_until": None, "attempts": record.attempts}
            service.jobs.update(record.id, only_if_owner=service.owner, **free)
            return False
        except OutputError as error:
            self._try_later(record, error)
            return True
        except DiffusionError as error:
            self._fail(taken, error)
        except Exception as error:  # the boundary around a record: the others' leases go on
            logger.exception("job %s cannot be taken up", record.id)
            self._fail(taken, InternalError(f"{type(error).__name__} while it was taken up"))
        self._tries.pop(record.id, None)
        return True

    def _try_later(self, record: JobRecord, error: OutputError) -> None:
        """The inputs cannot be read, or put anywhere, now: the job becomes a stray, and is taken up
        again when that is noticed."""
        self._tries[record.id] += 1
        if self._tries[record.id] >= MOST_TRIES:
            del self._tries[record.id]
            logger.error("job %s fails: %s", record.id, error)
            self._fail(record, InputLost("the inputs of the job cannot be read; its log says why"))
            return
        logger.warning("job %s is tried again: %s", record.id, error)
        back = {"attempts": record.attempts}
        self.service.jobs.update(record.id, only_if_owner=self.service.owner, **back)

    def _end_unheld(self, record: JobRecord) -> None:
        """End what no server has, of whatever model: it was cancelled, or its time is over."""
        if record.cancel_requested:
            self._end(record, status="cancelled")
            return
        late = DeadlineExceeded("the request's own time limit passed while no server was at it")
        self._fail(record, late)

    def _fail(self, record: JobRecord, error: DiffusionError) -> None:
        self._end(record, status="failed", error=client_error(error).as_object())

    def _end(self, record: JobRecord, **final: object) -> None:
        """End a job that does not come into line again."""
        service = self.service
        now = service.clock()
        final |= {"completed_at": now, "expires_at": now + service.job_ttl, "results": ()}
        written = service.jobs.update(record.id, only_if_owner=service.owner, **final)
        if written is not None:
            service.leftovers.drop(files_of(record))
            if service.checkpoints is not None and record.rerun is not None:
                service.checkpoints.drop(record.id, range(_most_parts(record)))

    def _try(self) -> None:
        try:
            self.tick()
        except StoreUnavailable as error:
            logger.warning("%s", error)
        except Exception:  # the boundary around a beat: without the next one all leases run out
            logger.exception("a beat of the jobs' keeper failed")

    def _loop(self) -> None:
        while not self._stop.wait(self.beat_seconds):
            self._try()


def _most_parts(record: JobRecord) -> int:
    """How many parts a job has at most: each makes one output at least."""
    settings = (record.rerun or {}).get("settings")
    seeds = settings.get("seed") if isinstance(settings, Mapping) else None
    return len(seeds) if isinstance(seeds, Sequence) else 1
