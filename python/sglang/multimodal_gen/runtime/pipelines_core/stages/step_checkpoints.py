"""States of the denoising loop on its way, from which it can go on after an interruption."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from sglang.multimodal_gen.runtime.pipelines_core.loop_state import (
    LoopState,
    NotKeepable,
    kept_copy,
    restored,
)
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stages.step_caches import StepCacheCalls

_CONFIG = "_internal_dict"  # the scheduler's own settings: the checkpoint of the model has them
_WARNING = "an interrupted job could not go on from its last state and began again"


class StepCheckpoints:
    """Hands the loop's state to whoever keeps it (``batch.control``), and takes one up again.

    Changes nothing that the loop computes: a loop that goes on gives the same bits as one that was
    never interrupted.
    """

    def begin(
        self,
        batch: Req,
        scheduler: Any,
        latents: Tensor,
        generators: Sequence[Generator],
        cache: StepCacheCalls | None = None,
    ) -> tuple[int, Tensor]:
        """How many steps are done already, and the latents to go on with.

        A state that is of another loop (other seeds, schedule, shape or precision) is not used.
        """
        state = batch.resume_from
        if state is None:
            return 0, latents
        fits = _fits(state, batch, scheduler, latents)
        fits = fits and _same_cache(state, cache)
        if not fits or len(state.generators) != len(generators):
            batch.warn(_WARNING, range(batch.batch_size))
            return 0, latents
        for name, value in state.scheduler.items():
            current = getattr(scheduler, name, None)
            device = current.device if isinstance(current, Tensor) else latents.device
            setattr(scheduler, name, restored(value, device))
        for generator, kept in zip(generators, state.generators, strict=True):
            generator.set_state(kept)
        if cache is not None:
            cache.take_up(restored(state.cache, latents.device))
        if batch.control.checkpoints is not None:
            batch.control.checkpoints.resumed(state.step)
        return state.step, restored(state.latents, latents.device)

    def step_done(
        self,
        batch: Req,
        scheduler: Any,
        step: int,
        latents: Tensor,
        generators: Sequence[Generator],
        cache: StepCacheCalls | None = None,
    ) -> None:
        """``step`` steps are done; ``latents`` are what the next one takes."""
        sink = batch.control.checkpoints
        total = len(batch.timesteps)
        if sink is None or step >= total or not sink.due(step, total):
            return
        if cache is not None and cache.dealt_out:
            return  # other ranks have the rest of what is kept: such a job begins again
        try:
            kept = {
                name: kept_copy(value) for name, value in vars(scheduler).items() if name != _CONFIG
            }
        except NotKeepable:
            return  # a scheduler with a noise source of its own: such a job begins again
        sink.save(
            LoopState(
                step=step,
                seeds=list(batch.seeds),
                timesteps=kept_copy(batch.timesteps),
                latents=kept_copy(latents),
                generators=[generator.get_state() for generator in generators],
                scheduler_class=type(scheduler).__name__,
                scheduler=kept,
                cache={} if cache is None else kept_copy(cache.kept()),
            )
        )


def _same_cache(state: LoopState, cache: StepCacheCalls | None) -> bool:
    """Whether a state was kept with the step cache that the batch has, or without as it."""
    mine = {} if cache is None else cache.kept()
    return all(state.cache.get(name) == mine.get(name) for name in ("method", "threshold"))


def _fits(state: LoopState, batch: Req, scheduler: Any, latents: Tensor) -> bool:
    return (
        list(state.seeds) == list(batch.seeds)
        and state.scheduler_class == type(scheduler).__name__
        and state.latents.shape == latents.shape
        and state.latents.dtype == latents.dtype
        and 0 < state.step < len(batch.timesteps)
        and torch.equal(state.timesteps, batch.timesteps.detach().cpu())
    )
