"""Input files that wait in the file store until their job has ended."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang.multimodal_gen.runtime.managers.client_error import PATH_SETTINGS
from sglang.multimodal_gen.runtime.managers.file_store import FileStore
from sglang.multimodal_gen.runtime.managers.jobs import JobRecord, JobStore
from sglang.multimodal_gen.runtime.managers.keeping import file_ids
from sglang.multimodal_gen.runtime.utils.errors import InputLost, OutputError, StoreUnavailable

logger = logging.getLogger(__name__)


def keep_inputs(
    store: FileStore, settings: Mapping[str, Any], expires_at: float
) -> dict[str, list[str]]:
    """Store the input files that settings name; their ids by field.

    Raises:
        OutputError: one cannot be read or stored; none stays.
        StoreUnavailable: the database does not answer.
    """
    kept: dict[str, list[str]] = {}
    try:
        for name in sorted(PATH_SETTINGS & settings.keys()):
            for path in _paths(settings[name]):
                file = store.put(_read(path), "application/octet-stream", ".input", expires_at)
                kept.setdefault(name, []).append(file.id)
    except (OutputError, StoreUnavailable):
        drop_files(store, (file_id for ids in kept.values() for file_id in ids))
        raise
    return kept


@contextlib.contextmanager
def fetched_inputs(
    store: FileStore | None, inputs: Mapping[str, Sequence[str]]
) -> Iterator[tuple[dict[str, list[str]], Path | None]]:
    """Put stored inputs into a private folder: their paths by field, and the folder.

    The folder is the caller's to remove, unless this raises.

    Raises:
        InputLost: one is gone.
        OutputError: one cannot be read now, or there is no place for it.
    """
    if not inputs:
        yield {}, None
        return
    folder = _private_folder()
    try:
        paths: dict[str, list[str]] = {}
        for name, ids in inputs.items():
            for index, file_id in enumerate(ids):
                place = folder / f"{name}-{index}"
                place.write_bytes(_stored(store, file_id))
                paths.setdefault(name, []).append(str(place))
        yield paths, folder
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise OutputError(f"no place for a job's inputs ({error.strerror})") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def files_of(record: JobRecord) -> list[str]:
    """The ids of all files that belong to a record."""
    return [*file_ids(record.results), *input_ids(record)]


def input_ids(record: JobRecord) -> list[str]:
    """The ids of a record's input files."""
    return [file_id for ids in record.inputs.values() for file_id in ids]


def drop_files(store: FileStore | None, file_ids: Iterable[str]) -> None:
    """Remove files, as far as they are there."""
    for file_id in file_ids:
        if store is not None:
            store.delete(file_id)


class FilesToDrop:
    """Removes files; what the store does not let go of now goes when it is asked again."""

    def __init__(self, store: FileStore | None) -> None:
        self.store = store
        self._left: list[tuple[str | None, str]] = []
        self._lock = threading.Lock()

    def drop(self, file_ids: Iterable[str]) -> None:
        """Remove files, now or later."""
        self._try([(None, file_id) for file_id in file_ids])

    def drop_unless_kept(self, job_id: str, file_ids: Iterable[str]) -> None:
        """Remove a job's inputs later, should it turn out that the store never took the job."""
        with self._lock:
            self._left += [(job_id, file_id) for file_id in file_ids]

    def again(self, jobs: JobStore) -> None:
        """Try what is left.

        Raises:
            StoreUnavailable: it is not the time yet.
        """
        with self._lock:
            left = list(self._left)
        if not left:
            return
        doubtful = {job_id for job_id, _ in left if job_id is not None}
        kept = {job_id for job_id in doubtful if jobs.get(job_id) is not None}
        with self._lock:
            self._left = self._left[len(left) :]  # others only append
        self._try([entry for entry in left if entry[0] not in kept])

    def _try(self, files: list[tuple[str | None, str]]) -> None:
        for index, (_, file_id) in enumerate(files):
            try:
                drop_files(self.store, [file_id])
            except StoreUnavailable as error:
                logger.warning("%d files are removed later: %s", len(files) - index, error)
                with self._lock:
                    self._left += files[index:]
                return


def _stored(store: FileStore | None, file_id: str) -> bytes:
    data = None if store is None else store.read(file_id)
    if data is None:
        raise InputLost("an input of the job is not stored any more; send the request again")
    return data


def _private_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="sglang-upload-"))
    except OSError as error:
        raise OutputError(f"no place for a job's inputs ({error.strerror})") from error


def _paths(value: Any) -> list[Path]:
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return [Path(path) for path in values]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise OutputError(f"an input of the job cannot be read ({error.strerror})") from error
