"""The schedule of one request."""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.utils.errors import (
    CheckpointError,
    InvalidRequest,
    PipelineDefinitionError,
)

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.server_args import ServerArgs


class TimestepPreparationStage(PipelineStage):
    """Sets the timesteps on the request's own copy of the scheduler (Diffusers' interface)."""

    uses = ()
    reads = frozenset(
        {"num_inference_steps", "raw_latent_shape", "latents", "height", "width", "task_type"}
    )
    writes = frozenset({"scheduler", "timesteps", "sigmas", "num_inference_steps", "latents"})

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        """Writes the timesteps [N] on the latents' device, the sigmas, and who made them.

        Brings the noise to the schedule's first level where it has one (``init_noise_sigma``).
        """
        config = self.pipeline_config(server_args)
        scheduler = copy.deepcopy(self.scheduler)
        shift = getattr(batch.request, "flow_shift", None)
        if shift is not None:
            scheduler = _with_flow_shift(scheduler, shift)
        if batch.num_inference_steps == 1 and scheduler.config.get("shift_terminal"):
            # Stretching a schedule until its last level fits divides zero by zero if it has one.
            scheduler.register_to_config(shift_terminal=None)
        sigmas = config.prepare_sigmas(None, batch.num_inference_steps)
        kwargs = config.prepare_extra_set_timesteps_kwargs(batch, scheduler.config)
        if sigmas is not None:
            kwargs["sigmas"] = sigmas
        else:
            kwargs["num_inference_steps"] = batch.num_inference_steps
        unknown = set(kwargs) - set(inspect.signature(scheduler.set_timesteps).parameters)
        if unknown:
            raise CheckpointError(
                f"{type(scheduler).__name__} takes no {', '.join(sorted(unknown))}, which this "
                "family needs; the checkpoint's scheduler is not the family's"
            )
        scheduler.set_timesteps(device=batch.latents.device, **kwargs)
        if len(scheduler.timesteps) == 0:
            raise PipelineDefinitionError(
                f"{type(scheduler).__name__} made no step of num_inference_steps="
                f"{batch.num_inference_steps}"
            )
        if hasattr(scheduler, "init_noise_sigma"):
            batch.latents = batch.latents * scheduler.init_noise_sigma
        batch.scheduler = scheduler
        batch.timesteps = scheduler.timesteps
        used = getattr(scheduler, "sigmas", None)
        batch.sigmas = None if used is None else used[: len(scheduler.timesteps)].tolist()
        batch.num_inference_steps = len(scheduler.timesteps)
        return batch


def _with_flow_shift(scheduler: Any, shift: float) -> Any:
    """The same scheduler with another static time shift, under the name that its config has."""
    config = scheduler.config
    name = next((n for n in ("flow_shift", "shift") if n in config), None)
    if name is None or config.get("use_dynamic_shifting", False):
        kind = "computes its shift itself" if name else "has none"
        problem = f"this checkpoint's {type(scheduler).__name__} {kind}; leave it out"
        raise InvalidRequest("flow_shift", shift, problem)
    return type(scheduler).from_config(config, **{name: float(shift)})
