"""Keeps a job's record true while the scheduler works on it."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.managers.client_error import PATH_SETTINGS, client_error
from sglang.multimodal_gen.runtime.managers.finished import (
    GIVEN,
    Finished,
    FinishedImage,
    FinishedVideo,
    finished_of,
    settings_of,
)
from sglang.multimodal_gen.runtime.managers.jobs import JobRecord, JobStore
from sglang.multimodal_gen.runtime.managers.keeping import KeepingLine, ResultKeeper, file_ids
from sglang.multimodal_gen.runtime.managers.kept_inputs import drop_files, input_ids
from sglang.multimodal_gen.runtime.managers.storage.checkpoints import CheckpointStore
from sglang.multimodal_gen.runtime.managers.visit import Visit, visiting
from sglang.multimodal_gen.runtime.pipelines_core.loop_state import LoopState
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch, Req
from sglang.multimodal_gen.runtime.utils.errors import (
    Cancelled,
    DiffusionError,
    InternalError,
    StoreUnavailable,
    Unavailable,
)
from sglang.multimodal_gen.runtime.utils.progress import Preview

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class FinishedJob:
    """What a job made, and what it took. ``queue_seconds`` is the wait for its first batch here.

    Of outputs that were kept, ``results`` say where they are, and ``images`` and ``videos`` are
    empty.
    """

    id: str
    images: Sequence[FinishedImage]
    videos: Sequence[FinishedVideo]
    results: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    warnings: Sequence[str]
    queue_seconds: float
    run_seconds: float
    timings: Mapping[str, float]
    peak_memory_mb: float


@dataclass(frozen=True, eq=False, slots=True)
class Keep:
    """How a job's outputs are kept."""

    format: str
    quality: int | None
    keeper: ResultKeeper
    line: KeepingLine


@dataclass(frozen=True, eq=False, slots=True)
class JobPlaces:
    """What jobs have in common: where records, states and times come from."""

    store: JobStore
    owner: str
    clock: Callable[[], float]
    job_ttl: float
    checkpoints: CheckpointStore | None = None
    on_end: Callable[[str], object] = lambda job_id: None


@dataclass(eq=False, slots=True)
class JobProgress:
    """A `waiting_line.Watcher`. ``parts`` is how many batches the job is cut into.

    ``folder`` holds input files that were fetched for it, and goes with its end. ``came_at`` is
    when it came into line here: later than the record says, where it was interrupted.
    """

    record: JobRecord
    params: SamplingParams
    places: JobPlaces
    parts: int = 1
    on_preview: Callable[[Preview], None] | None = None
    keep: Keep | None = None
    folder: Path | None = None
    result: Future[FinishedJob] = field(default_factory=Future)
    outputs: list[Finished] = field(default_factory=list)
    results: list[Mapping[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    peak_memory_mb: float = 0.0
    came_at: float = 0.0
    started_at: float | None = None
    percent: int = 0
    count: int = 0
    _ended: bool = False
    _failure: DiffusionError | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.came_at = self.came_at or self.record.created_at

    def started(self) -> None:
        """The first batch begins."""
        self.started_at = self.places.clock()
        self._later(status="in_progress", started_at=self.started_at)

    def shown_again(self) -> None:
        """Its record says that it waits, and it runs."""
        self._later(status="in_progress")

    def progressed(self, fraction: float) -> None:
        """How much is done."""
        percent = min(99, int(100 * fraction))
        if percent > self.percent:
            self.percent = percent
            self._later(progress=percent)

    def previewed(self, preview: Preview) -> None:
        """A look at an unfinished image."""
        if self.on_preview is not None:
            self.on_preview(preview)

    @property
    def keeps_states(self) -> bool:
        """Whether it can go on after a restart."""
        return self.record.rerun is not None and self.places.checkpoints is not None

    def checkpointed(self, part: int, state: LoopState) -> None:
        """Where a part stands; it is written beside the loop."""
        assert self.places.checkpoints is not None
        self.places.checkpoints.save(self.record.id, part, state)

    def resumed(self, part: int, step: int) -> None:
        """A part went on after some steps."""
        self._later(resumed_at_step=step)

    def made(self, output: OutputBatch) -> None:
        """The next outputs, in order."""
        made = finished_of(output)
        self.count += len(made)
        self.warnings += [text for text in output.warnings if text not in self.warnings]
        for stage, seconds in output.timings.items():
            self.timings[stage] = self.timings.get(stage, 0.0) + seconds
        self.peak_memory_mb = max(self.peak_memory_mb, output.peak_memory_mb)
        if self.keep is not None:
            # What is made is kept at once: after an interruption it is not made again.
            name = f"{self.record.id}-{self.count}"
            self.keep.line.run(name, lambda: self._store(made), lambda: None)
        else:
            self.outputs += made

    def take_up(self, results: Sequence[Mapping[str, Any]], parts: Sequence[Req]) -> int:
        """Count the parts whose outputs are kept already; those outputs are the job's."""
        done = images = 0
        while done < len(parts) and images + parts[done].batch_size <= len(results):
            images += parts[done].batch_size
            done += 1
        self.results = list(results[:images])
        self.percent = self.record.progress
        return done

    def ended(self, error: DiffusionError | None) -> None:
        """Nothing more will come."""
        if self.keep is not None and error is None:
            # In the same line, so after all of its outputs.
            finish = lambda: self._finish(None)  # noqa: E731
            self.keep.line.run(self.record.id, finish, self._given_up, holds_pixels=False)
        else:
            self._finish(error)

    def _given_up(self) -> None:
        self._finish(Cancelled("cancelled while its result was stored"))

    def _store(self, made: Sequence[Finished]) -> None:
        """Encode and store outputs; the first that fails is the job's failure."""
        keep = self.keep
        assert keep is not None
        if self._ended or self._failure is not None:
            return
        try:
            with visiting(Visit(client=self.record.client)):  # the files are its client's
                results = keep.keeper.keep(made, keep.format, self._settings(), keep.quality)
        except DiffusionError as error:
            self._failure = error
            return
        except BaseException as error:
            self._failure = InternalError(f"{type(error).__name__} while storing: {error}")
            raise
        with self._lock:
            if not self._ended:
                self.results += results
                results = ()
        if results:
            keep.keeper.discard(results)  # cancelled in the meantime
            return
        if self.record.rerun is not None:
            self._write(results=tuple(self.results))

    def _finish(self, error: DiffusionError | None) -> None:
        """Write the record's end once, and tell who waits."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        error = error or self._failure
        now = self.places.clock()
        if isinstance(error, Unavailable) and self.record.rerun is not None:
            self.places.on_end(self.record.id)  # before it can come back to this very server
            self._hand_back()
        else:
            written = self._write(**self._final(error, now))
            if written is not None:
                self._clean_up(written)
            else:
                self._discard_if_lost()
            self.places.on_end(self.record.id)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        if error is not None:
            self.result.set_exception(error)
        else:
            self.result.set_result(self._finished(now))

    def _final(self, error: DiffusionError | None, now: float) -> dict[str, Any]:
        """The fields of the record's end."""
        seconds = self.places.job_ttl
        if self.keep is not None and error is None:
            seconds = max(seconds, self.keep.keeper.file_ttl)  # it says where its files are
        final: dict[str, Any] = {
            "completed_at": now,
            "expires_at": now + seconds,
            "warnings": tuple(self.warnings),
        }
        if error is None:
            results: list[Mapping[str, Any]] = [{"seed": output.seed} for output in self.outputs]
            if self.keep is not None:
                gone = now + self.keep.keeper.file_ttl
                results = [{**result, "expires_at": gone} for result in self.results]
            return final | {"status": "completed", "progress": 100, "results": tuple(results)}
        final["results"] = ()
        if isinstance(error, Cancelled):
            return final | {"status": "cancelled"}
        return final | {"status": "failed", "error": client_error(error).as_object()}

    def _discard_if_lost(self) -> None:
        """If the job is another server's by now, or gone, remove what was stored of it here."""
        if self.keep is None:
            return
        try:
            record = self.places.store.get(self.record.id)
            if record is None and self.keeps_states:  # nobody will go on with it
                assert self.places.checkpoints is not None
                self.places.checkpoints.drop(self.record.id, range(self.parts))
            if record is None or record.owner != self.places.owner:
                self._discard_all_but(() if record is None else record.results)
        except StoreUnavailable as error:  # it is not known: what is made stays until it expires
            logger.warning("files of job %s were not removed: %s", self.record.id, error)

    def _discard_all_but(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Remove the outputs stored here that the record does not tell of (a server that took the
        job up may have counted some in)."""
        assert self.keep is not None
        ids = file_ids(told)
        self.keep.keeper.discard([r for r in self.results if r.get("file_id") not in ids])

    def _hand_back(self) -> None:
        """The job waits in the store for a server that can run it, with what is made so far."""
        self._write(status="queued", owner=None, lease_until=None, results=tuple(self.results))

    def _clean_up(self, record: JobRecord) -> None:
        """What only an unfinished job needs goes."""
        if self.places.checkpoints is not None and self.record.rerun is not None:
            self.places.checkpoints.drop(record.id, range(self.parts))
        if self.keep is None:
            return
        keeper = self.keep.keeper
        try:
            if record.completed_at is not None:
                keeper.keep_until(record.results, record.completed_at + keeper.file_ttl)
            drop_files(keeper.files, input_ids(record))
            self._discard_all_but(record.results)
        except StoreUnavailable as error:  # the end of the record takes them along
            logger.warning("files of job %s were not removed: %s", record.id, error)

    def _write(self, **changes: Any) -> JobRecord | None:
        """Write now; None where that cannot be, or the job is another server's by now."""
        try:
            return self.places.store.update(
                self.record.id, only_if_owner=self.places.owner, **changes
            )
        except StoreUnavailable as error:
            logger.warning("the record of job %s is behind: %s", self.record.id, error)
            return None

    def _later(self, **changes: Any) -> None:
        """Write now and then: a denoising step must not wait for the disk."""
        self.places.store.update_later(self.record.id, only_if_owner=self.places.owner, **changes)

    def _settings(self) -> dict[str, Any]:
        """The settings in force; of inputs that they were given, not where this server had them."""
        settings = settings_of(self.params)
        given = {name: GIVEN for name in PATH_SETTINGS if settings.pop(name, None)}
        return settings | given

    def _finished(self, now: float) -> FinishedJob:
        began = now if self.started_at is None else self.started_at
        return FinishedJob(
            id=self.record.id,
            images=tuple(o for o in self.outputs if isinstance(o, FinishedImage)),
            videos=tuple(o for o in self.outputs if isinstance(o, FinishedVideo)),
            results=tuple(self.results),
            settings=self._settings(),
            warnings=tuple(self.warnings),
            queue_seconds=began - self.came_at,
            run_seconds=now - began,
            timings=self.timings,
            peak_memory_mb=self.peak_memory_mb,
        )
