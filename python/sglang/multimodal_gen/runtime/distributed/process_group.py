"""How a process becomes a rank: the meeting place, torch's process group, and the groups on it."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from sglang.multimodal_gen.runtime.distributed.layout import ParallelLayout
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState

logger = logging.getLogger(__name__)

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
    chooses: the socket is open before anyone knows the port, so nobody can take it. With one, on
    the interface that its host names (`listen_on`).

    Raises:
        OSError: the port is taken.
    """
    if address is None:
        listener = socket.create_server(("127.0.0.1", 0))
        host, port = "127.0.0.1", listener.getsockname()[1]
    else:
        host, port = address
        listener = listen_on(host, port)
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=MEETING_SECONDS),
        master_listen_fd=listener.detach(),
    )
    return store, StoreAddress(host, port)


def listen_on(host: str, port: int) -> socket.socket:
    """A listening socket on the interface that ``host`` names.

    On every interface where that cannot be: ``host`` is none of this machine's addresses (others
    reach it through a gateway), or a name that only means this machine to itself, as a line such as
    ``127.0.1.1 node0`` in its hosts file makes it.

    Raises:
        OSError: the port is taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, _, _, _, address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        place = str(address[0])
        if ipaddress.ip_address(place.partition("%")[0]).is_loopback and host not in (
            place,
            "localhost",
        ):
            continue
        try:
            return socket.create_server((place, port), family=family)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    logger.warning("%r is no address of this machine's own: listening on all interfaces", host)
    return socket.create_server(("", port))


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
