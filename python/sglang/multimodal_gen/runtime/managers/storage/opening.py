"""All that a server keeps, opened together: the database, files, states, and its own name."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from sglang.multimodal_gen.runtime.managers.file_store import FileStore
from sglang.multimodal_gen.runtime.managers.storage.blob_folder import BlobFolder
from sglang.multimodal_gen.runtime.managers.storage.buffered_jobs import BufferedJobStore
from sglang.multimodal_gen.runtime.managers.storage.checkpoints import CheckpointStore
from sglang.multimodal_gen.runtime.managers.storage.database import Database
from sglang.multimodal_gen.runtime.managers.storage.server_slot import ServerSlot
from sglang.multimodal_gen.runtime.managers.storage.shared_files import SharedFileStore
from sglang.multimodal_gen.runtime.managers.storage.sql_jobs import SqlJobStore
from sglang.multimodal_gen.runtime.server_args.serving import ServingArgs
from sglang.multimodal_gen.runtime.utils.errors import OutputError, StoreUnavailable

logger = logging.getLogger(__name__)

_MEMORY = "sqlite://"
_MAX_FINISHED_IN_MEMORY = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """What a server keeps. ``files`` and ``checkpoints`` are None where no files are kept."""

    database: Database
    jobs: BufferedJobStore
    records: SqlJobStore
    files: FileStore | None
    checkpoints: CheckpointStore | None
    owner: str

    def clean_up(self) -> None:
        """Remove what no record tells of: files and states that an end in mid-work left behind.

        Raises:
            StoreUnavailable, OutputError: it cannot be looked at now.
        """
        if isinstance(self.files, SharedFileStore):
            self.files.remove_orphans()
        if self.checkpoints is not None:
            self.checkpoints.remove_orphans(self.records.unfinished)


@contextlib.contextmanager
def open_storage(
    serving: ServingArgs, tell: Callable[[str], object] = logger.info
) -> Iterator[Storage]:
    """Open what the arguments name; closed at the end.

    Where the default folder cannot be written, nothing outlives the server, and a warning says so.

    Raises:
        InvalidArgument: an address is none, or an extra is missing.
        OutputError, StoreUnavailable: what was asked for cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        place = _state_folder(serving)
        url = serving.store.job_store
        slot = None
        if url == "memory":
            url, place = _MEMORY, None
        elif place is not None:
            slot = stack.enter_context(contextlib.closing(ServerSlot(place / "servers")))
        if url is None:
            url = _MEMORY if place is None else f"sqlite:///{place / 'jobs.sqlite3'}"
        database = stack.enter_context(contextlib.closing(Database(url, tell=tell)))
        most = _MAX_FINISHED_IN_MEMORY if database.in_memory else None
        store = SqlJobStore(database, max_finished=most)
        owner = uuid.uuid4().hex if slot is None else slot.owner
        store.disown(owner)  # what this server had when it ended without a word
        folder = _file_folder(serving, place, database, stack)
        checkpoints = None
        if folder is not None and not database.in_memory:
            checkpoints = CheckpointStore(folder.folder("states"))
            stack.callback(checkpoints.close)
        yield Storage(
            database=database,
            jobs=BufferedJobStore(store),
            records=store,
            files=None if folder is None else SharedFileStore(folder.folder("files"), database),
            checkpoints=checkpoints,
            owner=owner,
        )


def _state_folder(serving: ServingArgs) -> Path | None:
    """The folder of what survives; None where the default one cannot be written."""
    named = serving.store.state_dir
    if named is not None:
        place = Path(named).expanduser().absolute()
        _make(place)
        return place
    if serving.store.job_store == "memory":
        return None
    place = platformdirs.user_state_path("sglang-diffusion", appauthor=False)
    try:
        _make(place)
    except OutputError as error:
        logger.warning("%s; jobs will not survive this server. Name a --state-dir", error)
        return None
    return place


def _make(place: Path) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=place):  # permission bits lie: only writing tells
            pass
    except OSError as error:
        raise OutputError(f"cannot use the state folder {str(place)!r}: {error.strerror}") from (
            error
        )


def _file_folder(
    serving: ServingArgs, place: Path | None, database: Database, stack: contextlib.ExitStack
) -> BlobFolder | None:
    """Where bytes go: a folder of this database alone, so that what is left over can be told."""
    named = serving.keep.file_store
    if named == "off":
        return None
    if named is None and place is None:
        return _private_folder(stack)
    if named is None:
        return BlobFolder(str(place)).folder("files").folder(database.store_id)
    if "://" not in named:
        named = str(Path(named).expanduser().absolute())
    return BlobFolder(named).folder(database.store_id)


def _private_folder(stack: contextlib.ExitStack) -> BlobFolder | None:
    """A folder that goes with the server; None where there is no writable disk at all."""
    try:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="sglang-files-", ignore_cleanup_errors=True)
        )
    except OSError as error:
        logger.warning("no place for files (%s): replies carry their pictures", error.strerror)
        return None
    return BlobFolder(folder)


def quiet_clean_up(storage: Storage) -> None:
    """`Storage.clean_up`, where a failure is only worth a line in the log."""
    try:
        storage.clean_up()
    except (StoreUnavailable, OutputError) as error:
        logger.warning("left-over files were not removed: %s", error)
