"""How ranks that the front did not start get a line to it."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time
from typing import Any

import torch.distributed as dist

from sglang.multimodal_gen.runtime.distributed.process_group import MEETING_SECONDS, listen_on
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.managers.ranks.channel import Channel
from sglang.multimodal_gen.runtime.managers.ranks.messages import (
    FrontAddress,
    Hello,
    RankLeft,
    Stop,
)
from sglang.multimodal_gen.runtime.managers.ranks.wire import (
    DoesNotTravel,
    pack,
    packages_of,
    unpack,
)
from sglang.multimodal_gen.runtime.utils.environ import EXTERNAL_MODEL_PACKAGE
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, WorkerDied

_FRONT_KEY = "front"
_SECRET_BYTES = 32
_HELLO_SECONDS = 10.0


class Guests:
    """The front's side: lets in who shows the run's secret, which the store holds.

    It listens on the interface of ``host`` alone, where that is one of this machine's. The network
    between nodes must be trusted as far as the store is: torch's own lines between ranks ask for no
    secret at all.
    """

    def __init__(self, model: ModelDescription, host: str, store: dist.Store) -> None:
        self.ranks: dict[int, Channel] = {}
        self.nodes: dict[int, Channel] = {}
        self._arguments = common_arguments(model)
        self._packages = trusted_packages(model)
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._listener = listen_on(host, 0)
        front = FrontAddress(host, self._listener.getsockname()[1], self._secret)
        store.set(_FRONT_KEY, pack(front).hex())

    def await_all(self, ranks: list[int], nodes: list[int]) -> None:
        """Wait until these ranks and other nodes' commands are there, in ``ranks`` and ``nodes``.

        Raises:
            InvalidArgument: one was started with other arguments.
            WorkerDied: one did not come in time, or is gone again.
        """
        deadline = time.monotonic() + MEETING_SECONDS
        with self._listener:
            while missing := self._missing(ranks, nodes):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise WorkerDied(f"{missing} did not come within {MEETING_SECONDS} seconds")
                self._listener.settimeout(min(left, 1.0))
                with contextlib.suppress(TimeoutError):
                    self._let_in(self._listener.accept()[0])
                self._check_nodes()

    def _missing(self, ranks: list[int], nodes: list[int]) -> str:
        absent = [f"node {node}" for node in nodes if node not in self.nodes]
        absent += [f"rank {rank}" for rank in ranks if rank not in self.ranks]
        return ", ".join(absent)

    def _check_nodes(self) -> None:
        """Nodes that are here have nothing to say yet but that something went wrong."""
        for node, channel in self.nodes.items():
            if not channel.has_news():
                continue
            said = f"node {node} ended, or cannot be reached"
            with contextlib.suppress(EOFError, OSError):
                left: RankLeft = channel.receive()
                said = f"rank {left.rank} {left.how} on node {node}\n{left.output}".rstrip()
            raise WorkerDied(said)

    def _let_in(self, line: socket.socket) -> None:
        line.settimeout(_HELLO_SECONDS)
        if not hmac.compare_digest(_exactly(line, _SECRET_BYTES), self._secret):
            line.close()
            return
        channel = Channel(line, self._packages)
        try:
            hello: Hello = channel.receive()
        except (DoesNotTravel, EOFError, OSError):
            channel.close()
            return  # gone again, or of another version; if it was one of ours, its node says so
        wrong = _difference(self._arguments, hello.arguments)
        if wrong is not None:
            name, value, other = wrong
            who = f"node {hello.node}" if hello.rank is None else f"rank {hello.rank}"
            problem = f"is {other!r} on {who}. Start all of them with the same command."
            error = InvalidArgument(name, value, problem)
            channel.send(Stop(str(error)))
            raise error
        if hello.rank is None:
            self.nodes[hello.node] = channel
        else:
            self.ranks[hello.rank] = channel


def find_front(store: dist.Store) -> FrontAddress:
    """Where the front is; waits until it says so.

    Raises:
        WorkerDied: it did not.
    """
    try:
        return unpack(bytes.fromhex(store.get(_FRONT_KEY).decode()))
    except RuntimeError as error:
        raise WorkerDied(f"rank 0 did not say where it is: {error}") from error


def meet_front(front: FrontAddress, hello: Hello) -> Channel:
    """A line to the front.

    Raises:
        WorkerDied: it cannot be reached.
    """
    try:
        line = socket.create_connection((front.host, front.port), timeout=MEETING_SECONDS)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(front.secret)
    except OSError as error:
        place = f"{front.host}:{front.port}"
        raise WorkerDied(f"rank 0 cannot be reached at {place}: {error}") from error
    channel = Channel(line)
    channel.send(hello)
    return channel


def trusted_packages(model: ModelDescription) -> frozenset[str]:
    """The packages whose classes and functions the processes of a run may name to each other:
    this one, and those that the model's own classes and the external models are from.
    """
    info = model.info
    classes = (info.pipeline_cls, info.sampling_param_cls, type(model.config))
    external = {name.partition(".")[0] for name in EXTERNAL_MODEL_PACKAGE.read()}
    return packages_of(classes) | external


def common_arguments(model: ModelDescription) -> dict[str, Any]:
    """The server arguments that all processes of a run must have in common."""
    values = model.server_args.to_flat()
    del values["node_rank"]
    return values


def _difference(ours: dict[str, Any], theirs: dict[str, Any] | None) -> tuple[str, Any, Any] | None:
    """The first argument that differs: its name, and both values."""
    if theirs is None:
        return None  # a rank that a node's command started, which has said them already
    names = [name for name in ours if theirs.get(name) != ours[name]]
    return (names[0], ours[names[0]], theirs.get(names[0])) if names else None


def _exactly(line: socket.socket, count: int) -> bytes:
    """Some bytes of a stream; fewer if it ends or says nothing."""
    data = b""
    with contextlib.suppress(OSError):
        while len(data) < count and (part := line.recv(count - len(data))):
            data += part
    return data
