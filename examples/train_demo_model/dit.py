"""Stages 4 and 5: the text encoders alone, then with the DiT, by flow matching on the pool."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.train_demo_model.clock import Clock, Log
from examples.train_demo_model.engine import CPU_MODES, Engine, Hook, Mode, Schedule, train
from examples.train_demo_model.lessons import (
    Pupil,
    dit_draw,
    dit_step,
    is_matrix,
    text_draw,
    text_step,
)
from examples.train_demo_model.models import DemoModel
from examples.train_demo_model.pool import Pool

TEXT_SCHEDULE = Schedule(peak=2e-3, warmup=200, decay_from=0.4, average=0.99)
DIT_SCHEDULE = Schedule(peak=1.6e-3, warmup=400, decay_from=0.4, average=0.9995)
SAVE_EVERY, SCORE_EVERY, READ_EVERY = 150.0, 75.0, 15.0


class Trainer:
    """The networks under training, their average, and what they are taught with."""

    def __init__(
        self,
        model: DemoModel,
        pool: Pool,
        empty: tuple[Tensor, Tensor],
        batch: int,
        device: torch.device,
    ) -> None:
        self.pupil = Pupil(model).to(device).train()
        self.average = copy.deepcopy(self.pupil).eval().requires_grad_(False)
        self.pool, self.empty, self.batch, self.device = pool, empty, batch, device

    def text_engine(self) -> Engine:
        """Trains the text encoders and the heads."""
        return Engine(
            self.pupil,
            self.average,
            draw=text_draw(self.pool, self.batch, self.device),
            loss=text_step,
            trained=lambda name: not name.startswith("model.transformer."),
            is_matrix=is_matrix,
            compile_blocks=lambda pupil: pupil.model.compile_blocks(),
        )

    def dit_engine(self) -> Engine:
        """Trains everything."""
        return Engine(
            self.pupil,
            self.average,
            draw=dit_draw(self.pool, self.empty, self.batch, self.device),
            loss=dit_step,
            is_matrix=is_matrix,
            compile_blocks=lambda pupil: pupil.model.compile_blocks(),
        )


def save_engine(engine: Engine, file: Path, clock: Clock) -> None:
    """Everything that a later piece needs, under another name first."""
    part = file.with_suffix(".part")
    torch.save(engine.state() | {"clock": clock.state()}, part)
    part.rename(file)


def load_engine(engine: Engine, file: Path, clock: Clock) -> None:
    """Continues where :func:`save_engine` left."""
    saved: dict[str, Any] = torch.load(file, map_location=engine.device, weights_only=True)
    engine.load(saved)
    clock.steps, clock.seconds = saved["clock"]["steps"], saved["clock"]["seconds"]


def train_stage(
    engine: Engine,
    clock: Clock,
    schedule: Schedule,
    state_file: Path,
    log: Log,
    *,
    stage: str,
    modes: Sequence[Mode] = CPU_MODES,
    finish: bool = False,
    looks: Sequence[tuple[float, Callable[[], None]]] = (),
) -> bool:
    """Resumes the stage, trains until the clock says so, saves; True when it is complete.

    ``finish``: the stage ends with this piece, whatever its plan was. ``looks``: what to do every
    so many seconds.
    """
    if state_file.exists():
        load_engine(engine, state_file, clock)
    torch.manual_seed(1 + clock.steps)
    engine.settle(modes, log, stage)
    clock.pause()
    if finish:
        clock.finish_here()
    hooks = [Hook(every, action) for every, action in looks]
    hooks.append(Hook(SAVE_EVERY, lambda: save_engine(engine, state_file, clock)))
    done = train(engine, clock, schedule, log, stage, hooks)
    save_engine(engine, state_file, clock)
    engine.close()
    return done
