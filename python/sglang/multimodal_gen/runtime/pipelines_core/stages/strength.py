"""A given clip in place of noise: how far the schedule goes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.server_args import ServerArgs


class StrengthStage(PipelineStage):
    """Starts from a given clip instead of from noise: SDEdit (Meng et al. 2021).

    Of N steps the last ``int(N * strength)`` are made; the clip gets the noise of the first of
    them. Does nothing without a clip.
    """

    uses = ()
    reads = frozenset({"latents", "video_latent", "scheduler", "timesteps", "sigmas"})
    writes = frozenset({"latents", "scheduler", "timesteps", "sigmas", "num_inference_steps"})

    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        """Writes noisy latents, and what is left of the schedule."""
        if batch.video_latent is None:
            return batch
        strength = getattr(batch.request, "strength", 1.0)
        total = len(batch.timesteps)
        start = total - steps_of(total, strength)
        first = batch.timesteps[start]
        batch.latents = _noised(batch.scheduler, batch.video_latent, batch.latents, first)
        # The sigmas stay whole: a scheduler looks its place up in them.
        batch.scheduler.set_begin_index(start)
        batch.timesteps = batch.timesteps[start:]
        batch.sigmas = None if batch.sigmas is None else batch.sigmas[start:]
        batch.num_inference_steps = total - start
        return batch


def steps_of(total: int, strength: float) -> int:
    """How many of the steps are made; the reference cuts off, so that 0.8 of 4 is 3."""
    return min(int(total * strength), total)


def _noised(scheduler: Any, clean: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
    """Clean latents with the noise of a timestep, as the scheduler mixes them."""
    times = timestep.expand(len(clean))
    if hasattr(scheduler, "add_noise"):
        return scheduler.add_noise(clean, noise, times)
    return scheduler.scale_noise(clean, times, noise)
