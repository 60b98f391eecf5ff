"""When to stop: one decision, taken by all ranks of a replica at the same place."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import RequestControl
from sglang.multimodal_gen.runtime.utils.errors import Cancelled, InternalError
from sglang.multimodal_gen.runtime.utils.progress import Phase, ProgressEvent

_PHASES = ("load", "denoise", "decode")


class Agreement:
    """The lead's wish to stop, made known one place ahead.

    A rank that stopped alone would leave the others waiting in a collective. So at each place where
    ranks report, the lead's wish is sent without waiting for it, and read at the next place: all
    stop there, and no step waits for a message.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.reports = 0
        self._sent: tuple[torch.Tensor, dist.Work, tuple[int, ...]] | None = None

    def stop(self, wish: bool, phase: Phase, done: int, total: int) -> bool:
        """Whether to stop at this place; ``wish`` counts on the lead alone.

        Raises:
            InternalError: the lead is at another place: a stage reports on some ranks only.
        """
        self.reports += 1
        if self.group.size == 1:
            return wish
        if self._read():
            return True
        place = (_PHASES.index(phase), done, total)
        message = torch.tensor([int(wish), *place])
        work = self.group.broadcast_later(message)
        assert work is not None
        self._sent = (message, work, place)
        return False

    def _read(self) -> bool:
        if self._sent is None:
            return False
        message, work, place = self._sent
        self._sent = None
        work.wait()
        wish, *theirs = message.tolist()
        if tuple(theirs) != place:
            here, there = _told(place), _told(tuple(theirs))
            raise InternalError(
                f"rank {self.group.ranks[self.group.rank]} reported {here} while its lead reported "
                f"{there}: a stage must report on all ranks of a replica, or on none"
            )
        return bool(wish)


@dataclass(frozen=True, slots=True)
class SharedControl(RequestControl):
    """`RequestControl` on a rank: only the lead has a listener, and all ranks stop together.

    A wish to stop is heeded at the second report after it at the latest.
    """

    agreement: Agreement = field(default_factory=lambda: Agreement(Group("control")))

    def report(self, phase: Phase, done: int, total: int, label: str) -> None:
        """Tell the caller how far a phase has come; stop here if all ranks agreed to."""
        if self.agreement.stop(self.cancelled.is_set(), phase, done, total):
            raise Cancelled(f"stopped by the caller in {label}, {done} of {total}")
        if self.listener is not None:
            self.listener(ProgressEvent(phase, done, total, label))


def _told(place: tuple[int, ...]) -> str:
    phase, done, total = place
    name = _PHASES[phase] if 0 <= phase < len(_PHASES) else "nothing"
    return f"{name} {done} of {total}"
