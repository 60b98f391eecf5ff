"""Stage 4: the text encoders and the DiT, by flow matching on the pool."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.train_demo_model.clock import Clock, Log, learning_rate
from examples.train_demo_model.models import DemoModel
from examples.train_demo_model.pool import Pool
from examples.train_demo_model.vae import autocast

PEAK_RATE = 1.2e-3
DECAY_FROM = 0.45
"""Share of the stage after which the rate falls linearly to zero."""
EMA_DECAY = 0.999
DROP_PROMPT = 0.1
UNIFORM_TIMES = 0.2
TIME_MEAN = 0.5
"""Of the logit of time: above 0 since a scene's layout is decided at high noise."""
SAVE_EVERY = 150.0
SCORE_EVERY = 75.0


class DitTrainer:
    """The networks under training, their average, and the optimiser."""

    def __init__(
        self,
        model: DemoModel,
        pool: Pool,
        empty: tuple[Tensor, Tensor],
        batch: int,
        device: torch.device,
    ) -> None:
        self.model = model.to(device).train()
        self.average = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.pool, self.empty, self.batch, self.device = pool, empty, batch, device
        decayed = [p for p in self.model.parameters() if p.ndim >= 2]
        rest = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.02}, {"params": rest, "weight_decay": 0.0}],
            lr=PEAK_RATE,
            betas=(0.9, 0.98),
            fused=True,
        )
        self._weights: list[Tensor] = list(self.model.parameters())
        self._averages: list[Tensor] = list(self.average.parameters())
        self.generator = torch.Generator(device)

    def save(self, file: Path, clock: Clock) -> None:
        """Everything that a later piece needs, under another name first."""
        part = file.with_suffix(".part")
        torch.save(
            {
                "model": self.model.state_dict(),
                "average": self.average.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "clock": clock.state(),
            },
            part,
        )
        part.rename(file)

    def load(self, file: Path, clock: Clock) -> None:
        """Continues where :meth:`save` left."""
        saved = torch.load(file, map_location=self.device, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.average.load_state_dict(saved["average"])
        self.optimizer.load_state_dict(saved["optimizer"])
        clock.steps, clock.seconds = saved["clock"]["steps"], saved["clock"]["seconds"]

    def step(self, fraction: float, steps: int) -> tuple[Tensor, Tensor]:
        """One step of training; loss and gradient norm, not synchronised."""
        rate = learning_rate(PEAK_RATE, fraction, steps, warmup=400, decay_from=DECAY_FROM)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self._loss()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        self.optimizer.step()
        decay = min(EMA_DECAY, (1 + steps) / (10 + steps))
        torch._foreach_lerp_(self._averages, self._weights, 1 - decay)
        return loss.detach(), norm

    def _loss(self) -> Tensor:
        """Mean squared error of the velocity on a random batch."""
        device, count = self.device, self.batch
        chosen = torch.randint(len(self.pool.latents), (count,), device=device)
        saying = torch.randint(self.pool.t5.shape[1], (count,), device=device)
        data = self.pool.latents[chosen].float()
        dropped = (torch.rand(count, device=device) < DROP_PROMPT)[:, None]
        t5 = torch.where(dropped, self.empty[0], self.pool.t5[chosen, saying].long())
        clip = torch.where(dropped, self.empty[1], self.pool.clip[chosen, saying].long())

        time_B = sample_times(count, device)
        noise = torch.randn_like(data)
        level = time_B[:, None, None]
        with autocast(device):
            velocity = self.model(torch.lerp(data, noise, level), t5, clip, time_B)
        return F.mse_loss(velocity.float(), noise - data)


def sample_times(count: int, device: torch.device) -> Tensor:
    """Times in 0..1: logit-normal (Esser et al., 2024, section 3.1) with a uniform share."""
    uniform = torch.rand(count, device=device)
    normal = torch.sigmoid(torch.randn(count, device=device) + TIME_MEAN)
    return torch.where(torch.rand(count, device=device) < UNIFORM_TIMES, uniform, normal)


def train_dit(
    trainer: DitTrainer,
    clock: Clock,
    state_file: Path,
    log: Log,
    *,
    compile_blocks: bool,
    finish: bool,
    quick_score: Callable[[], None],
) -> bool:
    """Trains until the clock says so; True when the stage is complete.

    ``finish``: the stage ends with this piece, whatever its plan was.
    """
    torch.manual_seed(1 + clock.steps)
    if compile_blocks:
        _try_compiled(trainer, log)
        clock.pause()
    if finish:
        clock.finish_here()
    next_report, next_save = 0.0, log.seconds() + SAVE_EVERY
    next_score = log.seconds() + SCORE_EVERY
    report_steps, report_at = clock.steps, log.seconds()
    while not (clock.done or clock.out_of_time):
        loss, norm = trainer.step(clock.fraction, clock.steps)
        clock.tick()
        now = log.seconds()
        if now >= next_report:
            value = loss.item()
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"loss={value} at step {clock.steps}; the last state stays"
                )
            now = log.seconds()
            speed = (clock.steps - report_steps) / max(now - report_at, 1e-6)
            log(
                "dit",
                step=clock.steps,
                loss=value,
                grad=norm.item(),
                it_s=speed,
                done=clock.fraction,
                eta=clock.eta(),
            )
            report_steps, report_at, next_report = clock.steps, now, now + 5
        if now >= next_score:
            quick_score()
            clock.pause()
            report_steps, report_at = clock.steps, log.seconds()
            next_score = log.seconds() + SCORE_EVERY
        if now >= next_save:
            trainer.save(state_file, clock)
            clock.pause()
            next_save = log.seconds() + SAVE_EVERY
    trainer.save(state_file, clock)
    return clock.done


def _try_compiled(trainer: DitTrainer, log: Log) -> None:
    """Compiles the blocks and tries them on one batch; eager execution if that fails."""
    begin = log.seconds()
    trainer.model.compile_blocks()
    try:
        trainer._loss().backward()
        trainer.optimizer.zero_grad(set_to_none=True)
    except RuntimeError as error:
        trainer.model.uncompile()
        log("dit", compiled="no", reason=repr(error)[:300])
    else:
        log("dit", compiled="yes", seconds=log.seconds() - begin)
