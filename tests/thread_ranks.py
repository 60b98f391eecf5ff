"""Runs a test's function on several ranks that are threads: no process, no network, milliseconds.

For layers that are handed a `Group`; what torch.distributed itself does is tested with `ranks`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.distributed.group import Group

TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True)
class _Job:
    queue: Queue[Tensor]
    into: Tensor

    def wait(self) -> None:
        got = self.queue.get(timeout=TIMEOUT_SECONDS)
        assert got.shape == self.into.shape, "a rank was sent something else than it waits for"
        self.into.copy_(got)


@dataclass(frozen=True, eq=False)
class ThreadGroup(Group):
    """A group whose members are threads that put copies into each other's queues."""

    mail: dict[tuple[int, int], Queue[Tensor]] = field(default_factory=dict)

    def exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> list[Any]:
        if not sends and not receives:
            return []
        self._count("exchange")
        for to, x in sends.items():
            assert x.is_contiguous()
            self.mail[self.rank, to].put(x.clone())
        return [_Job(self.mail[source, self.rank], x) for source, x in receives.items()]

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        if self.size == 1:
            return x
        self._count("all_gather")
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank in others:
            self.mail[self.rank, rank].put(x.clone())
        pieces = {r: self.mail[r, self.rank].get(timeout=TIMEOUT_SECONDS) for r in others}
        pieces[self.rank] = x
        assert len({tuple(piece.shape) for piece in pieces.values()}) == 1
        return torch.cat([pieces[rank] for rank in range(self.size)], dim)

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        self._count("all_reduce")
        return self.all_gather(x[None]).sum(0)  # in the same order on each rank

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        if self.size == 1:
            return x
        self._count("broadcast")
        if self.rank == source:
            for rank in range(self.size):
                if rank != source:
                    self.mail[source, rank].put(x.clone())
            return x
        _Job(self.mail[source, self.rank], x).wait()
        return x


def run_threads(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``function(group, *args)`` returned on each rank; a rank's error is raised here."""
    mail: dict[tuple[int, int], Queue[Tensor]] = defaultdict(Queue)
    for source in range(ranks):
        for to in range(ranks):
            mail[source, to] = Queue()
    everyone = tuple(range(ranks))
    groups = [ThreadGroup("threads", rank, everyone, mail=mail) for rank in everyone]
    with ThreadPoolExecutor(ranks) as pool:
        done = [pool.submit(function, group, *args) for group in groups]
        results = [job.result() for job in done]
    assert all(queue.empty() for queue in mail.values()), "something was sent and not waited for"
    return results
