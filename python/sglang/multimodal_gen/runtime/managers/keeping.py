"""Results that a server keeps: encoded, stored, and only then called completed."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image

from sglang.multimodal_gen.configs.task_type import DataType
from sglang.multimodal_gen.runtime.managers.file_store import FileStore
from sglang.multimodal_gen.runtime.managers.finished import Finished, FinishedImage, FinishedVideo
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest, UserError
from sglang.multimodal_gen.runtime.utils.image_file import FORMATS, ImageMetadata, encode_image
from sglang.multimodal_gen.runtime.utils.video_file import (
    MEDIA_TYPES,
    VIDEO_FORMATS,
    check_video_format,
    encode_video,
)

logger = logging.getLogger(__name__)

ImageFormat = Literal["png", "jpeg", "webp"]
VideoFormat = Literal["mp4", "gif", "webp"]
KeepFormat = ImageFormat | VideoFormat

THUMBNAIL_EDGE = 320
_THUMBNAIL_QUALITY = 80
_MOST_WAITING = 4


def check_keep_format(format: str, makes: DataType, fps: int | None) -> None:
    """Refuse, before the work, a format that does not fit what is made or cannot be written here.

    Raises:
        InvalidRequest: another kind of output has that format, or it cannot play at ``fps``.
        UserError: a package is missing.
    """
    known = get_args(VideoFormat if makes is DataType.VIDEO else ImageFormat)
    if format not in known:
        raise InvalidRequest("output_format", format, f"must be one of {', '.join(known)} here")
    if makes is DataType.VIDEO:
        assert fps is not None, "a clip has a rate"
        check_video_format(VIDEO_FORMATS[f".{format}"], fps)


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
        self, outputs: Sequence[Finished], format: str, settings: Mapping[str, Any]
    ) -> tuple[dict[str, Any], ...]:
        """Store all outputs; what a job's record says about each.

        That is ``seed``, ``file_id``, ``content_type``, ``bytes``, ``expires_at``, ``width``,
        ``height``, and for clips ``num_frames``, ``fps`` and ``thumbnail_id``.

        Raises:
            OutputError: one cannot be written; then none is kept.
        """
        expires = self.clock() + self.file_ttl
        kept: list[dict[str, Any]] = []
        try:
            for output in outputs:
                kept.append({"seed": output.seed, "expires_at": expires})
                self._keep_one(output, format, settings, kept[-1])
        except BaseException:
            self.discard(kept)
            raise
        return tuple(kept)

    def discard(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Remove the files that a record's results name."""
        for result in results:
            for name in ("file_id", "thumbnail_id"):
                if name in result:
                    self.files.delete(result[name])

    def _keep_one(
        self, output: Finished, format: str, settings: Mapping[str, Any], entry: dict[str, Any]
    ) -> None:
        about = ImageMetadata(output.prompt, output.seed, self.model, settings)
        expires = entry["expires_at"]
        if isinstance(output, FinishedImage):
            data = encode_image(output.array, FORMATS[f".{format}"], metadata=about)
            media_type = f"image/{format}"
            height, width = output.array.shape[:2]
        else:
            name = VIDEO_FORMATS[f".{format}"]
            data = encode_video(output.frames, output.fps, name, metadata=about)
            media_type = MEDIA_TYPES[name]
            count, height, width = output.frames.shape[:3]
            entry |= {"num_frames": count, "fps": output.fps}
            small = thumbnail(output)
            entry["thumbnail_id"] = self.files.put(small, "image/webp", ".webp", expires).id
        file = self.files.put(data, media_type, f".{format}", expires)
        entry |= {
            "file_id": file.id,
            "content_type": media_type,
            "bytes": file.size,
            "width": width,
            "height": height,
        }


def thumbnail(video: FinishedVideo) -> bytes:
    """A small WebP picture of a clip's first frame."""
    image = Image.fromarray(video.frames[0])
    image.thumbnail((THUMBNAIL_EDGE, THUMBNAIL_EDGE))
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(image)).save(buffer, "WEBP", quality=_THUMBNAIL_QUALITY)
    return buffer.getvalue()


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


def require_files(keeper: ResultKeeper | None) -> ResultKeeper:
    """The keeper, where there is one.

    Raises:
        UserError: the server keeps no files.
    """
    if keeper is None:
        raise UserError("this server keeps no files (--file-store off), which this result needs")
    return keeper
