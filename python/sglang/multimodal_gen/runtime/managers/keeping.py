"""Results that a server keeps: encoded, stored, and only then called completed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from sglang.multimodal_gen.runtime.managers.file_store import FileStore
from sglang.multimodal_gen.runtime.managers.finished import FinishedImage
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest, UserError
from sglang.multimodal_gen.runtime.utils.image_file import (
    DEFAULT_QUALITY,
    FORMATS,
    ImageMetadata,
    encode_image,
)

logger = logging.getLogger(__name__)

_IMAGE_FORMATS = ("png", "jpeg", "webp")
_MOST_WAITING = 4
UNTIL_FINISHED = 366 * 86400.0
"""Seconds that files of unfinished work are kept at most; its end sets the true time."""


def check_keep_format(format: str) -> None:
    """Refuse, before the work, a format that cannot be written here.

    Raises:
        InvalidRequest: it is none.
    """
    if format not in _IMAGE_FORMATS:
        known = ", ".join(_IMAGE_FORMATS)
        raise InvalidRequest("output_format", format, f"must be one of {known} here")


class ResultKeeper:
    """Encodes results and puts them in a file store, with what made them inside.

    ``model`` is what clients call the model; ``file_ttl`` the seconds that files are kept.
    """

    def __init__(
        self,
        files: FileStore,
        *,
        model: str,
        file_ttl: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.files = files
        self.model = model
        self.file_ttl = file_ttl
        self.clock = clock

    def keep(
        self,
        outputs: Sequence[FinishedImage],
        format: str,
        settings: Mapping[str, Any],
        quality: int | None = None,
    ) -> tuple[dict[str, Any], ...]:
        """Store all outputs; what a job's record says about each.

        That is ``seed``, ``file_id``, ``content_type``, ``bytes``, ``width`` and ``height``. The
        files stay until the job's end says how long (`keep_until`).

        Raises:
            OutputError: one cannot be written; then none is kept.
        """
        expires = self.clock() + UNTIL_FINISHED
        kept: list[dict[str, Any]] = []
        try:
            for output in outputs:
                kept.append(self._keep_one(output, format, settings, quality, expires))
        except BaseException:
            self.discard(kept)
            raise
        return tuple(kept)

    def keep_until(self, results: Sequence[Mapping[str, Any]], expires_at: float) -> None:
        """Say how long the files of results are kept."""
        self.files.keep_until(file_ids(results), expires_at)

    def discard(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Remove the files that a record's results name."""
        for file_id in file_ids(results):
            self.files.delete(file_id)

    def _keep_one(
        self,
        output: FinishedImage,
        format: str,
        settings: Mapping[str, Any],
        quality: int | None,
        expires_at: float,
    ) -> dict[str, Any]:
        data = encode_image(
            output.array,
            FORMATS[f".{format}"],
            quality=DEFAULT_QUALITY if quality is None else max(1, quality),
            metadata=ImageMetadata(output.prompt, output.seed, self.model, settings),
        )
        media_type = f"image/{format}"
        file = self.files.put(data, media_type, f".{format}", expires_at)
        height, width = output.array.shape[:2]
        return {
            "seed": output.seed,
            "file_id": file.id,
            "content_type": media_type,
            "bytes": file.size,
            "width": width,
            "height": height,
        }


class KeepingLine:
    """A thread beside the one that runs batches: the next runs while the last one is encoded.

    When `_MOST_WAITING` jobs wait for it, whoever brings another has to wait until it is done:
    memory for pixels stays bounded, and work slows down to what can be stored.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: dict[str, Callable[[], object]] = {}
        self._changed = threading.Condition()

    def run(self, job_id: str, work: Callable[[], object], give_up: Callable[[], object]) -> None:
        """Have ``work`` done. `cancel` calls ``give_up``, once, if it is not done by then."""
        with self._changed:
            crowded = len(self._jobs) >= _MOST_WAITING
            self._jobs[job_id] = give_up
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="keeping")
            future = self._thread.submit(self._do, job_id, work)
        if crowded:
            wait([future])

    def cancel(self, job_id: str) -> bool:
        """Give a job up; False if it is not here (any more)."""
        with self._changed:
            give_up = self._jobs.pop(job_id, None)
        if give_up is None:
            return False
        give_up()
        return True

    def close(self, timeout: float) -> bool:
        """Wait for what is here, and let the thread go; whether all was done in time."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._jobs, timeout)
            left = list(self._jobs)
            thread, self._thread = self._thread, None
        for job_id in left:
            self.cancel(job_id)
        if thread is not None:
            thread.shutdown(wait=done, cancel_futures=True)
        return done

    def _do(self, job_id: str, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException:
            logger.exception("a result could not be kept")
            raise
        finally:
            with self._changed:
                self._jobs.pop(job_id, None)
                self._changed.notify_all()


def file_ids(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The ids of the files that results name."""
    names = ("file_id", "thumbnail_id")
    return [result[name] for result in results for name in names if result.get(name)]


def require_files(keeper: ResultKeeper | None) -> ResultKeeper:
    """The keeper, where there is one.

    Raises:
        UserError: the server keeps no files.
    """
    if keeper is None:
        raise UserError("this server keeps no files (--file-store off), which this result needs")
    return keeper
