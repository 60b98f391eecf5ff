"""What one run left behind, the reference's or the port's, in one form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.verify.recorder import (
    Attempt,
    Call,
    Decode,
    SchedulerStep,
    recorded_attempts,
    recorded_calls,
    recorded_decodes,
    recorded_steps,
)


@dataclass(frozen=True)
class Branch:
    """One guidance branch of one step for one image: the inputs by name, and the prediction."""

    inputs: Mapping[str, Tensor]
    prediction: Tensor


@dataclass
class RunRecord:
    """One image's way from the noise to the picture; what a failed run did not reach is empty.

    ``order`` is where the positive branch stands among a step's, then the negative one.
    """

    attempts: list[Attempt] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    steps: list[SchedulerStep] = field(default_factory=list)
    decodes: list[Decode] = field(default_factory=list)
    timesteps: Tensor | None = None
    sigmas: Tensor | None = None
    pixels: Tensor | None = None
    raw_latent_shape: tuple[int, ...] | None = None
    guided: bool | None = None
    """Whether the port took the request for one with classifier-free guidance."""
    negative_embeds: bool | None = None
    """Whether any stage of the port wrote embeddings of the negative prompt."""
    embeddings: dict[str, Tensor] = field(default_factory=dict)
    """What the port's text encoders made, by field of the batch and place in it."""
    error: Exception | None = None
    order: tuple[int, ...] = (0, 1)

    @property
    def branch_count(self) -> int | None:
        """Forward passes of one image in one step; None if they do not come out even."""
        rows, steps = self._rows(), self._step_count()
        if not rows or not steps or len(rows) % steps:
            return None
        return len(rows) // steps

    def branches(self, step: int) -> list[Branch]:
        """A step's branches, the positive one first; empty if the run did not get there."""
        count = self.branch_count
        if count is None:
            # A run that stopped in its first step still shows what it was given there.
            return self._rows()[:2] if step == 0 and not self.steps else []
        step = step % self._step_count()
        rows = self._rows()[step * count : (step + 1) * count]
        if count == len(self.order) and len(rows) == count:
            return [rows[index] for index in self.order]
        return rows

    @property
    def latents(self) -> Tensor | None:
        """What the decoder was given."""
        return torch.cat([d.latents for d in self.decodes]) if self.decodes else None

    @property
    def picture(self) -> Tensor | None:
        """What the decoder made of it, before anything is clipped."""
        pictures = [d.picture for d in self.decodes if d.picture is not None]
        return torch.cat(pictures) if pictures else None

    def _step_count(self) -> int:
        return len(self.steps)

    def _rows(self) -> list[Branch]:
        return [row for call in self.calls for row in _rows(call)]


def _rows(call: Call) -> Iterator[Branch]:
    """A call's rows, each with the inputs that have one row for each (or one value for all)."""
    batch = len(call.output)
    for index in range(batch):
        inputs = {}
        for name, value in call.inputs.items():
            whole = torch.atleast_1d(value)
            if len(whole) in (1, batch):
                row = index if len(whole) == batch else 0
                inputs[name] = whole[row : row + 1]
        yield Branch(inputs, call.output[index : index + 1])


@contextmanager
def recorded_run(
    denoisers: Sequence[nn.Module], decoder: Any, scheduler: type
) -> Iterator[RunRecord]:
    """A record that fills while the context is open."""
    record = RunRecord()
    with ExitStack() as stack:
        record.attempts = stack.enter_context(recorded_attempts(denoisers))
        record.calls = stack.enter_context(recorded_calls(denoisers))
        record.steps = stack.enter_context(recorded_steps(scheduler))
        if decoder is not None:
            record.decodes = stack.enter_context(recorded_decodes(decoder))
        yield record
