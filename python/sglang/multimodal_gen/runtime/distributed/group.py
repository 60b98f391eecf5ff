"""Ranks that do one thing together, and the few things they can do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 gave the old name a new one and warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, eq=False)
class Group:
    """Some ranks of the run, in a fixed order. A group of one does nothing and sends nothing.

    The only place that calls ``torch.distributed`` for tensors: layers and stages are handed the
    groups that they need when they are built, and never ask who they are.

    Args:
        name: for messages, e.g. ``tp``.
        rank: this process's place in the group, from 0.
        ranks: the global ranks of its members.
        handle: torch's process group; None for a group of one.
        traffic: calls made, by verb: the proof that a mechanism ran. Not counted while torch
            compiles; what a CUDA graph holds is counted when it is recorded, not when it is
            replayed (its runner counts replays).
    """

    name: str
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    handle: dist.ProcessGroup | None = None
    traffic: Counter[str] = field(default_factory=Counter)

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this process is the group's first rank."""
        return self.rank == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place where ``x`` is contiguous."""
        if self.size == 1:
            return x
        self._count("all_reduce")
        x = x.contiguous()
        dist.all_reduce(x, group=self.handle)
        return x

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Every rank's ``x`` (equal shapes), concatenated along ``dim`` in rank order."""
        if self.size == 1:
            return x
        self._count("all_gather")
        dim = dim % x.ndim
        x = x.contiguous()
        flat = x.new_empty((self.size * x.shape[0], *x.shape[1:]) if x.ndim else (self.size,))
        _all_gather(flat, x, group=self.handle)
        if dim == 0:
            return flat
        pieces = flat.unflatten(0, (self.size, x.shape[0]))
        return pieces.movedim(0, dim).flatten(dim, dim + 1)

    def all_to_all(self, x: Tensor, *, scatter: int, gather: int) -> Tensor:
        """Gives away equal pieces along ``scatter`` and collects along ``gather``.

        ``scatter``'s size shrinks by the group's size, ``gather``'s grows by it. Pieces arrive in
        rank order.

        Raises:
            ValueError: ``scatter`` does not divide.
        """
        if self.size == 1:
            return x
        scatter, gather = scatter % x.ndim, gather % x.ndim
        if x.shape[scatter] % self.size:
            raise ValueError(
                f"dimension {scatter} of {tuple(x.shape)} does not divide over {self.size} ranks "
                f"of group {self.name!r}"
            )
        # [.., scatter, ..] -> [size, .., scatter / size, ..]
        sent = x.unflatten(scatter, (self.size, -1)).movedim(scatter, 0)
        return self.deal(sent).movedim(0, gather).flatten(gather, gather + 1)

    def deal(self, x: Tensor) -> Tensor:
        """``x[i]`` goes to rank ``i``; what rank ``i`` sent lies at ``i`` of the result.

        The all-to-all itself, for callers that pack their message. Counted as ``all_to_all``.
        """
        if self.size == 1:
            return x
        self._count("all_to_all")
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=self.handle)
        return received

    def deal_later(self, x: Tensor) -> Callable[[], Tensor]:
        """Starts `deal`; call what it returns for the result. Leave ``x`` alone until then."""
        if self.size == 1 or torch.compiler.is_compiling():  # which knows no handles
            received = self.deal(x)
            return lambda: received
        self._count("all_to_all")
        x = x.contiguous()
        received = torch.empty_like(x)
        # The pair keeps the message alive until it was waited for.
        pending = dist.all_to_all_single(received, x, group=self.handle, async_op=True), x

        def wait() -> Tensor:
            job, _ = pending
            assert job is not None
            job.wait()
            return received

        return wait

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """``x`` of the group's rank ``source``, written into everyone's (same shape and dtype)."""
        if self.size == 1:
            return x
        self._count("broadcast")
        x = x.contiguous()
        dist.broadcast(x, src=self.ranks[source], group=self.handle)
        return x

    def broadcast_later(self, x: Tensor, source: int = 0) -> dist.Work | None:
        """Starts `broadcast` into ``x``, which must be contiguous; wait before you read it.

        None in a group of one.
        """
        if self.size == 1:
            return None
        self._count("broadcast_later")
        return dist.broadcast(x, src=self.ranks[source], group=self.handle, async_op=True)

    def exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> list[dist.Work]:
        """Starts sending tensors to group ranks and filling tensors from group ranks.

        Wait for each returned handle before you touch the tensors. Ring attention passes keys on
        with it, a halo exchange its edge rows.
        """
        if not sends and not receives:
            return []
        self._count("exchange")
        jobs = [dist.P2POp(dist.isend, x, self.ranks[to], self.handle) for to, x in sends.items()]
        jobs += [
            dist.P2POp(dist.irecv, x, self.ranks[source], self.handle)
            for source, x in receives.items()
        ]
        return dist.batch_isend_irecv(jobs)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            dist.barrier(group=self.handle)

    def _count(self, verb: str) -> None:
        # A counter that a compiled graph reads would be one more thing to recompile for.
        if not torch.compiler.is_compiling():
            self.traffic[verb] += 1
