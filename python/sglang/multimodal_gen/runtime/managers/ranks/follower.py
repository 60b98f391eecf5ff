"""Processes that follow another's orders: commands of further nodes, and torchrun's other ranks."""

from __future__ import annotations

import os
import queue
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from sglang.multimodal_gen.runtime.distributed.process_group import (
    MEETING_SECONDS,
    StoreAddress,
    leave_ranks,
)
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.managers.ranks.channel import Channel
from sglang.multimodal_gen.runtime.managers.ranks.meeting import (
    common_arguments,
    find_front,
    meet_front,
)
from sglang.multimodal_gen.runtime.managers.ranks.messages import Hello, RankLeft, Stop
from sglang.multimodal_gen.runtime.managers.ranks.rank_loop import RankLoop
from sglang.multimodal_gen.runtime.managers.ranks.spawn import RankProcess, end_all
from sglang.multimodal_gen.runtime.managers.ranks.start import rank_task, start_ranks
from sglang.multimodal_gen.runtime.managers.ranks.wire import DoesNotTravel
from sglang.multimodal_gen.runtime.server_args.parallel_args import ParallelArgs
from sglang.multimodal_gen.runtime.utils.environ import LaunchedRank
from sglang.multimodal_gen.runtime.utils.errors import WorkerDied

_FAREWELL_SECONDS = 5.0
_TAIL_BYTES = 4000


def is_front(parallel: ParallelArgs, launched: LaunchedRank | None) -> bool:
    """Whether this process asks for work and gets its result; the others follow it."""
    return parallel.node_rank == 0 if launched is None else launched.rank == 0


def follow(model: ModelDescription, launched: LaunchedRank | None) -> None:
    """Work for the front until it says that the run is over.

    Raises:
        WorkerDied: the run failed, or the front is gone or never came.
    """
    if launched is None:
        _follow_node(model)
    else:
        _follow_launched(model, launched)


def _follow_node(model: ModelDescription) -> None:
    """Start this node's ranks, which find the front themselves, and look after them."""
    parallel = model.server_args.parallel
    assert parallel.init_address is not None
    address = StoreAddress(*parallel.init_address)
    try:
        store = address.connect(-1, parallel.layout.world_size)
    except RuntimeError as error:
        raise WorkerDied(
            f"node 0 did not answer at {parallel.dist_init_addr} within {MEETING_SECONDS} seconds"
        ) from error
    front = find_front(store)
    channel = meet_front(front, Hello(None, parallel.node_rank, common_arguments(model)))
    inbox: queue.Queue[tuple[int | None, object]] = queue.Queue()
    _read_into(inbox, None, channel)
    processes = start_ranks(model, address, front)
    try:
        for rank, process in processes.items():
            _read_into(inbox, rank, process.channel)
        _look_after(inbox, channel, processes)
    finally:
        end_all(list(processes.values()), 0.0)


def _look_after(
    inbox: queue.Queue[tuple[int | None, object]],
    front: Channel,
    processes: dict[int, RankProcess],
) -> None:
    while True:
        rank, message = inbox.get()
        if isinstance(message, Stop):
            if message.failure is not None:
                raise WorkerDied(f"the run failed: {message.failure}")
            end_all(list(processes.values()), _FAREWELL_SECONDS)
            return
        if rank is None:
            raise WorkerDied("node 0 ended, or cannot be reached; this node's ranks were ended")
        process = processes[rank]
        how = process.ended(1.0)
        if process.process.returncode == 0:
            continue  # it heard before us that the run is over
        words = process.last_words()
        front.send(RankLeft(rank, how, words))
        raise WorkerDied("\n".join([f"rank {rank} {how}; the run is over", words]).rstrip())


def _read_into(
    inbox: queue.Queue[tuple[int | None, object]], rank: int | None, channel: Channel
) -> None:
    """Put what comes over a line into ``inbox``, and None at its end."""

    def read() -> None:
        try:
            while True:
                inbox.put((rank, channel.receive()))
        except (EOFError, OSError, DoesNotTravel):  # what cannot be read leaves us deaf
            inbox.put((rank, None))
            channel.close()

    threading.Thread(target=read, name="follower", daemon=True).start()


def _follow_launched(model: ModelDescription, launched: LaunchedRank) -> None:
    """Be a rank in this very process, silent as long as nothing fails."""
    store = StoreAddress().connect(launched.rank, launched.world_size)
    hello = Hello(launched.rank, 0, common_arguments(model))
    channel = meet_front(find_front(store), hello)
    with _silence() as tell:

        def gone(stop: Stop | None) -> NoReturn:
            if stop is None:
                tell(f"rank {launched.rank}: rank 0 ended, or cannot be reached")
            elif stop.failure is not None:
                tell(f"rank {launched.rank} was ended, since the run failed")
            # This thread cannot stop the one that works.
            os._exit(0 if stop is not None and stop.failure is None else 1)

        task = rank_task(model, launched.rank, launched.local_rank)
        stop = RankLoop(task, channel, gone, store=store).run()
    leave_ranks()
    channel.close()
    if stop.failure is not None:
        raise WorkerDied(f"rank {launched.rank} was ended, since the run failed")


@contextmanager
def _silence() -> Iterator[_Teller]:
    """Send this process's output to a file, of which the end is shown with a failure."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile(prefix="rank-output-") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield _Teller(file.fileno(), kept[1])
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for number, original in zip((1, 2), kept, strict=True):
                os.dup2(original, number)
                os.close(original)


class _Teller:
    """Writes a failure to where standard error went before, with the end of what was silenced."""

    def __init__(self, silenced: int, errors: int) -> None:
        self._silenced, self._errors = silenced, errors

    def __call__(self, text: str) -> None:
        sys.stderr.flush()
        size = os.fstat(self._silenced).st_size
        tail = os.pread(self._silenced, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        os.write(self._errors, f"sglang: {text}\n".encode() + tail)
