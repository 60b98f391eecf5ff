"""A batch at work, and whom it tells what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sglang.multimodal_gen.runtime.managers.batch_merging import Rows
from sglang.multimodal_gen.runtime.managers.checkpoint_rule import CheckpointRule
from sglang.multimodal_gen.runtime.managers.waiting_line import Ticket
from sglang.multimodal_gen.runtime.pipelines_core.loop_state import LoopState
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.utils.progress import Preview, ProgressEvent

_DENOISING_SHARE = 0.95  # of a batch's progress; decoding is the rest


@dataclass(eq=False, slots=True)
class Member:
    """A request's part in the batch, and the images that are its own."""

    ticket: Ticket
    part: int
    rows: Rows


@dataclass(eq=False, slots=True)
class RunningBatch:
    """What runs, for whom; ``heard`` is when it was last heard of, by the scheduler's clock."""

    batch: Req
    members: list[Member]
    heard: float

    @property
    def live(self) -> list[Member]:
        """The members that still wait for it."""
        return [member for member in self.members if not member.ticket.ended]

    def tell_progress(self, event: ProgressEvent, now: float) -> None:
        """Tell each how much of its whole request is done."""
        self.heard = now
        share = event.done / event.total if event.total else 1.0
        if event.phase == "denoise":
            done = _DENOISING_SHARE * share
        else:
            done = _DENOISING_SHARE + (1 - _DENOISING_SHARE) * share
        for member in self.live:
            ticket = member.ticket
            images = ticket.parts[member.part].batch_size * done
            ticket.watcher.progressed((ticket.images_before(member.part) + images) / ticket.images)

    def tell_preview(self, preview: Preview) -> None:
        """Show an image to the one whose it is, by its number in that request."""
        for member in self.live:
            if preview.image in member.rows.indices:
                before = member.ticket.images_before(member.part)
                image = before + preview.image - member.rows.start
                shown = Preview(image, preview.step, preview.total, preview.pixels)
                member.ticket.watcher.previewed(shown)


@dataclass(eq=False, slots=True)
class BatchCheckpoints:
    """Deals the states of a running batch out to its members (a `loop_state.CheckpointSink`)."""

    rule: CheckpointRule
    clock: Callable[[], float]
    members: list[Member] = field(default_factory=list)
    last_step: int = 0
    last_time: float = 0.0

    def __post_init__(self) -> None:
        self.last_time = self.clock()

    def due(self, step: int, total: int) -> bool:
        """Whether somebody wants a state, and the last one is old enough."""
        seconds = self.clock() - self.last_time
        return bool(self._interested) and self.rule.due(step - self.last_step, seconds)

    def save(self, state: LoopState) -> None:
        """Each member gets its own images' part."""
        self.last_step, self.last_time = state.step, self.clock()
        for member in self._interested:
            own = state.rows(member.rows.start, member.rows.stop)
            member.ticket.watcher.checkpointed(member.part, own)

    def resumed(self, step: int) -> None:
        """The loop began after some steps."""
        self.last_step = step
        for member in self.members:
            member.ticket.watcher.resumed(member.part, step)

    @property
    def _interested(self) -> list[Member]:
        return [m for m in self.members if not m.ticket.ended and m.ticket.watcher.keeps_states]
