"""How a process becomes a rank: the meeting place, torch's process group, and the groups on it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from sglang.multimodal_gen.runtime.distributed.layout import ParallelLayout
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState

MEETING_SECONDS = 600
"""How long ranks wait for each other at the start: nodes are started by hand."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where the ranks of a run meet: torch's key-value store, at a host and port.

    Without a host it is torchrun's, which the environment names.
    """

    host: str | None = None
    port: int = 0

    def connect(self, rank: int, world_size: int) -> dist.Store:
        """The store, for a process that did not make it."""
        if self.host is None:
            store, _, _ = next(iter(rendezvous("env://", rank, world_size)))
            return store
        wait = timedelta(seconds=MEETING_SECONDS)
        return dist.TCPStore(
            self.host, self.port, is_master=False, wait_for_workers=False, timeout=wait
        )


def serve_store(address: tuple[str, int] | None = None) -> tuple[dist.TCPStore, StoreAddress]:
    """Make the store of a run in this process; it lives as long as the object.

    Without an address it listens on the loopback interface alone, at a port that the system
    chooses: the socket is open before anyone knows the port, so nobody can take it.

    Raises:
        OSError: the port is taken.
    """
    if address is None:
        listener = socket.create_server(("127.0.0.1", 0))
        host, port = "127.0.0.1", listener.getsockname()[1]
    else:
        host, port = address
        listener = socket.create_server(("", port))
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=MEETING_SECONDS),
        master_listen_fd=listener.detach(),
    )
    return store, StoreAddress(host, port)


def join_ranks(
    layout: ParallelLayout, rank: int, device: torch.device, store: dist.Store
) -> ParallelState:
    """Meet the other ranks of the run, and make the groups; all ranks call this.

    Args:
        layout: of the whole run.
        rank: this process's number in it.
        device: where it computes: a GPU of its own (NCCL) or the CPU (gloo).
        store: where the ranks meet.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("ranks", store),
        rank=rank,
        world_size=layout.world_size,
        device_id=device if on_gpu else None,
    )
    return ParallelState.create(layout, device)


def leave_ranks() -> None:
    """The end of `join_ranks`, for a process that goes on."""
    if dist.is_initialized():
        dist.destroy_process_group()
