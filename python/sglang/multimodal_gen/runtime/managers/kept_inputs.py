"""Input files that wait in the file store until their job has ended."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang.multimodal_gen.runtime.managers.client_error import PATH_SETTINGS
from sglang.multimodal_gen.runtime.managers.file_store import FileStore
from sglang.multimodal_gen.runtime.managers.jobs import JobRecord
from sglang.multimodal_gen.runtime.managers.keeping import file_ids
from sglang.multimodal_gen.runtime.utils.errors import OutputError, StoreUnavailable


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
        OutputError: one is gone, or there is no place for it.
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


def _stored(store: FileStore | None, file_id: str) -> bytes:
    data = None if store is None else store.read(file_id)
    if data is None:
        raise OutputError("an input of the job is not stored any more")
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
