"""Who is served next, and with whom: the order of waiting requests as pure logic.

**The rule.** Each waiting request has a due time: when it came, plus the seconds that its own work
will have taken by then (what it was served already, and its next batch), minus a head start of
`PRIORITY_SECONDS` for each point of priority. The earliest due time is served next.

So a small request overtakes a large one that came a little earlier, by up to the difference of
their work; a request of many batches lets others in between them; and nobody waits for ever: what
comes more than a request's own work later stands behind it, whatever its size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from sglang.multimodal_gen.runtime.managers.batch_merging import signature
from sglang.multimodal_gen.runtime.managers.cost_model import CostModel
from sglang.multimodal_gen.runtime.pipelines_core.loop_state import LoopState
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch, Req
from sglang.multimodal_gen.runtime.utils.errors import DiffusionError
from sglang.multimodal_gen.runtime.utils.progress import Preview

PRIORITY_SECONDS = 10.0
MAX_PRIORITY = 100


class Watcher(Protocol):
    """Who is told what becomes of a request.

    Called from the thread that runs batches, `ended` also from whoever cancels. Must not block.
    After `ended`, anything that still arrives is to be ignored.
    """

    def started(self) -> None:
        """The first batch begins."""
        ...

    def progressed(self, fraction: float) -> None:
        """How much of the whole request is done, 0 to 1."""
        ...

    def previewed(self, preview: Preview) -> None:
        """A look at an unfinished image; ``preview.image`` counts within the request."""
        ...

    def made(self, output: OutputBatch) -> None:
        """The next images of the request, in order."""
        ...

    @property
    def keeps_states(self) -> bool:
        """Whether it wants `checkpointed` to be called."""
        ...

    def checkpointed(self, part: int, state: LoopState) -> None:
        """Where the denoising of a part stands: its own copy."""
        ...

    def resumed(self, part: int, step: int) -> None:
        """A part went on after ``step`` steps that were done before."""
        ...

    def ended(self, error: DiffusionError | None) -> None:
        """Nothing more will come; ``error`` says why, if it was no success."""
        ...


@dataclass(eq=False, slots=True, kw_only=True)
class Ticket:
    """A request in the scheduler: its batches, of which ``position`` is the next to run."""

    id: str
    number: int
    parts: list[Req]
    watcher: Watcher
    arrived: float
    priority: int = 0
    deadline: float | None = None
    position: int = 0
    served_seconds: float = 0.0
    started: bool = False
    ended: bool = False
    signature: Hashable = field(default=None)

    def __post_init__(self) -> None:
        # A loop that goes on is at a step of its own: nothing else can join it.
        resumes = any(part.resume_from is not None for part in self.parts)
        self.signature = object() if resumes else signature(self.parts[0])

    @property
    def images(self) -> int:
        """Images of the whole request."""
        return sum(part.batch_size for part in self.parts)

    def images_before(self, part: int) -> int:
        """Images of the parts before one."""
        return sum(p.batch_size for p in self.parts[:part])


class WaitingLine:
    """The requests that wait for their next batch."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self._tickets: dict[str, Ticket] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(list(self._tickets.values()))

    def add(self, ticket: Ticket) -> None:
        """Put a request in line for its next batch."""
        self._tickets[ticket.id] = ticket

    def remove(self, ticket: Ticket) -> None:
        """Take a request out of the line; nothing happens if it is not there."""
        self._tickets.pop(ticket.id, None)

    def seconds(self) -> float:
        """An estimate of all work that waits."""
        return sum(
            self.costs.seconds(part)
            for ticket in self._tickets.values()
            for part in ticket.parts[ticket.position :]
        )

    def in_order(self) -> list[Ticket]:
        """The requests by due time; in order of arrival where that is equal."""
        return sorted(self._tickets.values(), key=lambda t: (self._due(t), t.number))

    def next_batch(self, max_images: int, *, together: bool) -> list[Ticket]:
        """The requests whose next parts run as one batch: the first in line, and those that fit.

        ``together`` is whether the pipeline lets requests share a batch.
        """
        chosen: list[Ticket] = []
        room = max_images
        for ticket in self.in_order():
            size = ticket.parts[ticket.position].batch_size
            if not chosen:
                chosen.append(ticket)
                room -= size
                if not together:
                    break
            elif size <= room and ticket.signature == chosen[0].signature:
                chosen.append(ticket)
                room -= size
        return chosen

    def _due(self, ticket: Ticket) -> float:
        work = ticket.served_seconds + self.costs.seconds(ticket.parts[ticket.position])
        return ticket.arrived + work - PRIORITY_SECONDS * ticket.priority
