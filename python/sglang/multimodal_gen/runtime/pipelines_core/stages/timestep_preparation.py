"""The schedule of one request."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.server_args import ServerArgs


class TimestepPreparationStage(PipelineStage):
    """Sets the timesteps on the request's own copy of the scheduler (Diffusers' interface)."""

    reads = frozenset({"num_inference_steps", "sigmas", "raw_latent_shape", "latents"})
    writes = frozenset({"scheduler", "timesteps", "sigmas", "num_inference_steps"})

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        """Writes the timesteps [N] on the latents' device, and the scheduler that made them."""
        config = self.pipeline_config(server_args)
        scheduler = copy.deepcopy(self.scheduler)
        sigmas = config.prepare_sigmas(batch.sigmas, batch.num_inference_steps)
        kwargs = config.prepare_extra_set_timesteps_kwargs(batch, scheduler.config)
        if sigmas is not None:
            kwargs["sigmas"] = sigmas
        else:
            kwargs["num_inference_steps"] = batch.num_inference_steps
        scheduler.set_timesteps(device=batch.latents.device, **kwargs)
        if len(scheduler.timesteps) == 0:
            raise InvalidRequest(
                "num_inference_steps", batch.num_inference_steps, "leaves no step to run"
            )
        batch.scheduler = scheduler
        batch.timesteps = scheduler.timesteps
        batch.sigmas = sigmas
        batch.num_inference_steps = len(scheduler.timesteps)
        return batch
