"""The denoising loop."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.cache.step_table import TableCounters, begin_tables
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.layers.computing_dtype import computing_dtype
from sglang.multimodal_gen.runtime.pipelines_core.role import RoleType
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.pipelines_core.stages.denoiser_inputs import (
    cast_embeddings,
    in_dtype,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.experts import Experts
from sglang.multimodal_gen.runtime.pipelines_core.stages.guidance import ClassifierFreeGuidance
from sglang.multimodal_gen.runtime.pipelines_core.stages.step_caches import StepCaches
from sglang.multimodal_gen.runtime.pipelines_core.stages.step_checkpoints import StepCheckpoints
from sglang.multimodal_gen.runtime.pipelines_core.stages.step_previews import StepPreviews
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.server_args import ServerArgs


class DenoisingStage(PipelineStage):
    """Runs the scheduler's steps over the denoiser's predictions.

    The denoiser gets embeddings and latents in its own precision; the latents themselves, between
    the steps, keep the one that the noise and the scheduler give them.
    """

    role_affinity = RoleType.DENOISER
    uses = ("transformer",)
    reads = frozenset(
        {
            "latents",
            "timesteps",
            "sigmas",
            "scheduler",
            "raw_latent_shape",
            "num_inference_steps",
            "prompt_embeds",
            "pooled_embeds",
            "prompt_attention_mask",
            "negative_prompt_embeds",
            "neg_pooled_embeds",
            "negative_attention_mask",
            "picture_spans",
            "prompt",
            "negative_prompt",
            "image_latent",
            "image_embeds",
            "image_path",
            "image_latent_shapes",
            "do_classifier_free_guidance",
            "guidance_scale",
            "true_cfg_scale",
            "height",
            "width",
            "task_type",
            "previews",
            "resume_from",
            "seeds",
        }
    )
    writes = frozenset(
        {
            "latents",
            "model_state",
            "scheduler",
            "prompt_embeds",
            "pooled_embeds",
            "negative_prompt_embeds",
            "neg_pooled_embeds",
            "image_latent",
            "step_cache",
        }
    )

    def __init__(
        self,
        transformer: nn.Module,
        scheduler: Any,
        guidance: ClassifierFreeGuidance | None = None,
        previews: StepPreviews | None = None,
        checkpoints: StepCheckpoints | None = None,
        experts: Experts | None = None,
        step_caches: StepCaches | None = None,
    ) -> None:
        self.transformer = transformer
        self.scheduler = scheduler
        self.previews = StepPreviews() if previews is None else previews
        self.checkpoints = StepCheckpoints() if checkpoints is None else checkpoints
        self.guidance = ClassifierFreeGuidance() if guidance is None else guidance
        self.experts = Experts(transformer) if experts is None else experts
        if step_caches is None:
            step_caches = StepCaches({self.experts.names[0]: transformer}, ParallelState.single())
        self.step_caches = step_caches
        self.table_counters = TableCounters()

    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        """Denoises ``batch.latents`` in place of the noise, ready for the VAE."""
        config = self.pipeline_config(server_args)
        scheduler = self._fresh_scheduler(batch)
        _check_negative(batch)
        dtype = computing_dtype(self.transformer)
        cast_embeddings(batch, dtype)
        batch.model_state = config.prepare_model_state(batch, self.transformer)
        batch.image_latent = in_dtype(batch.image_latent, dtype)
        total = len(batch.timesteps)
        experts = self.experts.of_steps(batch, config)
        self.experts.begin()
        # What the loop's own draws depend on; a stage whose loop draws declares that it reads them.
        generators = batch.generator if "generator" in (self.reads or ()) else []
        cache = self.step_caches.begin(batch)
        tables = begin_tables(batch.timesteps, len(batch.latents), self.table_counters)
        first, latents = self.checkpoints.begin(batch, scheduler, batch.latents, generators, cache)
        batch.control.report("denoise", first, total, "denoising")
        for step in range(first, total):
            t = batch.timesteps[step]
            model_input = in_dtype(_scaled(scheduler, latents, t), dtype)
            t_B = t.expand(len(latents))
            expert = experts[step]
            self.experts.bring(expert)
            rows = None if tables is None else tables.at(step)
            prediction = self.guidance.predict(
                expert.denoiser, config, batch, model_input, t_B, expert.scale, cache, rows
            )
            self.previews.show(batch, config, step, latents, prediction)
            latents = scheduler.step(prediction, t, latents, return_dict=False)[0]
            self.checkpoints.step_done(batch, scheduler, step + 1, latents, generators, cache)
            batch.control.report("denoise", step + 1, total, "denoising")
        self.step_caches.end(batch, cache)
        batch.latents = config.post_denoising_loop(latents, batch)
        return batch

    def _fresh_scheduler(self, batch: Req) -> Any:
        """The request's scheduler, at its first step; our own copy if no stage prepared one."""
        if batch.scheduler is None:
            batch.scheduler = _scheduler_for(self.scheduler, batch)
        begun = getattr(batch.scheduler, "begin_index", None)
        if begun is None and hasattr(batch.scheduler, "set_begin_index"):
            # Saves the look-up of the first timestep, which waits for the GPU.
            batch.scheduler.set_begin_index(0)
        return batch.scheduler


def _scheduler_for(shared: Any, batch: Req) -> Any:
    """A copy of the pipeline's scheduler that runs the timesteps a custom stage wrote."""
    scheduler = copy.deepcopy(shared)
    timesteps, sigmas = batch.timesteps, batch.sigmas
    current = scheduler.timesteps
    if current is not None and torch.equal(current.to(timesteps), timesteps):
        return scheduler  # the stage prepared the shared one
    if sigmas is None:
        scheduler.set_timesteps(len(timesteps), device=timesteps.device)
        return scheduler
    # Sigmas of a custom stage are final: whoever made them applied the shift.
    final = [] if len(sigmas) > len(timesteps) else [0.0]
    scheduler.timesteps = timesteps
    scheduler.sigmas = torch.tensor([*sigmas, *final], dtype=torch.float32)
    scheduler.num_inference_steps = len(timesteps)
    return scheduler


def _scaled(scheduler: Any, latents: Tensor, t: Tensor) -> Tensor:
    """Variance-exploding schedulers scale the input; flow matching does not."""
    if hasattr(scheduler, "scale_model_input"):
        return scheduler.scale_model_input(latents, t)
    return latents


def _check_negative(batch: Req) -> None:
    if batch.do_classifier_free_guidance and not batch.negative_prompt_embeds:
        raise PipelineDefinitionError(
            "classifier-free guidance is on, but negative_prompt_embeds is empty: the text stage "
            "must write it when batch.do_classifier_free_guidance is set"
        )
