"""Brings the ranks of a run together: those of this machine, other nodes', or torchrun's."""

from __future__ import annotations

import threading

from sglang.multimodal_gen.runtime.distributed.process_group import (
    StoreAddress,
    leave_ranks,
    serve_store,
)
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.managers.ranks.channel import Channel, channel_pair
from sglang.multimodal_gen.runtime.managers.ranks.crew import Crew
from sglang.multimodal_gen.runtime.managers.ranks.meeting import Guests, trusted_packages
from sglang.multimodal_gen.runtime.managers.ranks.messages import FrontAddress, RankTask
from sglang.multimodal_gen.runtime.managers.ranks.rank_loop import RankLoop
from sglang.multimodal_gen.runtime.managers.ranks.spawn import (
    RankProcess,
    end_all,
    log_levels,
    processors_each,
)
from sglang.multimodal_gen.runtime.managers.ranks.wire import pack
from sglang.multimodal_gen.runtime.utils.environ import LaunchedRank
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument


def start_crew(model: ModelDescription, launched: LaunchedRank | None) -> Crew:
    """All ranks of a run, with a line to each; their model is not loaded yet.

    Raises:
        InvalidArgument: another node was started with other arguments, or the address is taken.
        WorkerDied: a node or rank did not come in time.
    """
    if launched is not None:
        return _among_launched(model, launched)
    parallel = model.server_args.parallel
    try:
        store, address = serve_store(parallel.init_address)
    except OSError as error:
        problem = f"cannot listen there: {error.strerror}."
        raise InvalidArgument("dist_init_addr", parallel.dist_init_addr, problem) from error
    processes = start_ranks(model, address)
    channels = {rank: process.channel for rank, process in processes.items()}
    nodes: dict[int, Channel] = {}
    if parallel.init_address is not None and parallel.nnodes > 1:
        away = [rank for rank in range(parallel.layout.world_size) if rank not in processes]
        try:
            guests = Guests(model, parallel.init_address[0], store)
            guests.await_all(away, list(range(1, parallel.nnodes)))
        except BaseException:
            end_all(list(processes.values()), 0.0)
            raise
        channels, nodes = channels | guests.ranks, guests.nodes
    return Crew(channels, processes, nodes, store=store)


def start_ranks(
    model: ModelDescription, store: StoreAddress, front: FrontAddress | None = None
) -> dict[int, RankProcess]:
    """Start the ranks of this node; ``front`` is where they find it, if it is on another."""
    here = model.server_args.parallel.ranks_here
    packed = pack(model)
    started: dict[int, RankProcess] = {}
    try:
        for local_rank, rank in enumerate(here):
            task = rank_task(model, rank, local_rank, store=store, model_bytes=packed, front=front)
            started[rank] = RankProcess.start(task, processors=processors_each(len(here)))
    except BaseException:
        end_all(list(started.values()), 0.0)
        raise
    return started


def rank_task(
    model: ModelDescription,
    rank: int,
    local_rank: int,
    *,
    store: StoreAddress | None = None,
    model_bytes: bytes | None = None,
    front: FrontAddress | None = None,
) -> RankTask:
    """What a rank of a run with this model has to know."""
    parallel = model.server_args.parallel
    return RankTask(
        rank=rank,
        local_rank=local_rank,
        node=parallel.node_rank,
        layout=parallel.layout,
        one_node=parallel.nnodes == 1,
        device=model.server_args.platform.device,
        store=store,
        model=pack(model) if model_bytes is None else model_bytes,
        packages=trusted_packages(model),
        log_levels=log_levels(),
        front=front,
    )


def _among_launched(model: ModelDescription, launched: LaunchedRank) -> Crew:
    """The crew where each rank is a process of torchrun's: this one is rank 0, on a thread."""
    store = StoreAddress().connect(0, launched.world_size)
    guests = Guests(model, launched.host, store)
    guests.await_all(list(range(1, launched.world_size)), [])
    task = rank_task(model, 0, launched.local_rank)
    ours, theirs = channel_pair(task.packages)
    line = Channel(theirs)
    loop = RankLoop(task, line, gone=lambda stop: None, store=store)

    def work() -> None:
        try:
            loop.run()
            leave_ranks()
        finally:
            line.close()

    thread = threading.Thread(target=work, name="rank 0", daemon=True)
    thread.start()
    return Crew({0: ours, **guests.ranks}, {}, store=store, rank_here=thread)
