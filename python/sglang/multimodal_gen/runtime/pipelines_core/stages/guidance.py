"""How the denoiser's predictions become one: with or without classifier-free guidance."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
from sglang.multimodal_gen.runtime.cache.graph_runner import Caller, call_plainly
from sglang.multimodal_gen.runtime.cache.step_table import StepRows
from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stages.step_caches import StepCacheCalls
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError

BRANCHES = 2
POSITIVE, NEGATIVE = range(BRANCHES)
PREDICTION_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
IDLE_BRANCH = (
    "guidance is off for this request, so under CFG parallelism half of the ranks had nothing to do"
)


class ClassifierFreeGuidance:
    """``negative + scale * (positive - negative)``, Ho and Salimans 2022.

    Two forwards of their own, as in the reference, so that a branch may have its own text length.
    Without guidance the second forward is not paid for.

    Args:
        call: how the denoiser is called: plainly, or through recordings of its GPU work.
    """

    def __init__(self, call: Caller = call_plainly) -> None:
        self.call = call

    def predict(
        self,
        transformer: nn.Module,
        config: PipelineConfig,
        batch: Req,
        latent_model_input: Tensor,
        t_B: Tensor,
        scale: float | None = None,
        cache: StepCacheCalls | None = None,
        rows: StepRows | None = None,
    ) -> Tensor:
        """The prediction for one step, like the latents; ``scale`` in place of the batch's.

        ``cache`` calls the denoiser where steps may be skipped; ``rows`` were computed for
        several steps at once.
        """
        arguments = (transformer, config, batch, latent_model_input, t_B, cache, rows)
        positive = self._branch(POSITIVE, *arguments)
        if not batch.do_classifier_free_guidance:
            return positive
        negative = self._branch(NEGATIVE, *arguments)
        return _guided(config, batch, positive, negative, scale)

    def _branch(
        self,
        branch: int,
        transformer: nn.Module,
        config: PipelineConfig,
        batch: Req,
        latent_model_input: Tensor,
        t_B: Tensor,
        cache: StepCacheCalls | None,
        rows: StepRows | None,
    ) -> Tensor:
        """One branch's prediction; arguments are prepared for no other."""
        prepare = (config.prepare_pos_cond_kwargs, config.prepare_neg_cond_kwargs)[branch]
        kwargs = prepare(batch, latent_model_input, t_B)
        if rows is not None:
            at_time = partial(prepare, batch, latent_model_input)
            kwargs = rows.given(transformer, branch, kwargs, at_time)
        if cache is not None:
            return cache(transformer, branch, kwargs)
        return self.call(transformer, kwargs)


class ParallelGuidance(ClassifierFreeGuidance):
    """The same on two ranks: the first predicts the positive branch, the second the negative one.

    Both exchange their predictions and combine them alike, so their latents stay equal bit by bit.
    Without guidance the first alone predicts, and the second is handed the prediction.

    Args:
        group: the two ranks.
        call: as `ClassifierFreeGuidance`.

    Raises:
        ValueError: they are not two.
    """

    def __init__(self, group: Group, call: Caller = call_plainly) -> None:
        super().__init__(call)
        if group.size != BRANCHES:
            raise ValueError(f"guidance has {BRANCHES} branches, and {group.name!r} {group.size}")
        self.group = group
        self._dtypes: dict[tuple[nn.Module, torch.dtype], torch.dtype] = {}

    def predict(
        self,
        transformer: nn.Module,
        config: PipelineConfig,
        batch: Req,
        latent_model_input: Tensor,
        t_B: Tensor,
        scale: float | None = None,
        cache: StepCacheCalls | None = None,
        rows: StepRows | None = None,
    ) -> Tensor:
        """The prediction for one step, on both ranks."""
        arguments = (transformer, config, batch, latent_model_input, t_B, cache, rows)
        if batch.do_classifier_free_guidance:
            own = self._branch(self.group.rank, *arguments)
            positive, negative = self.group.all_gather(own[None])
            return _guided(config, batch, positive, negative, scale)
        if IDLE_BRANCH not in batch.warnings:
            batch.warnings.append(IDLE_BRANCH)
        own = self._branch(POSITIVE, *arguments) if self.group.is_first else None
        dtype = self._dtype(transformer, latent_model_input, own)
        if own is None:
            own = latent_model_input.new_empty(latent_model_input.shape, dtype=dtype)
        return self.group.broadcast(own)

    def _dtype(self, transformer: nn.Module, latents: Tensor, own: Tensor | None) -> torch.dtype:
        """The predictions' dtype, a fact of the model. Told once: the telling waits for the GPU.

        Raises:
            PipelineDefinitionError: on both ranks, if a prediction is unlike the latents.
        """
        key = (transformer, latents.dtype)
        if key not in self._dtypes:
            fits = own is not None and own.shape == latents.shape
            fits = fits and own is not None and own.dtype in PREDICTION_DTYPES
            code = PREDICTION_DTYPES.index(own.dtype) if fits and own is not None else -1
            code = int(self.group.broadcast(torch.tensor([code], device=latents.device)).item())
            if code < 0:
                raise PipelineDefinitionError(
                    f"{type(transformer).__name__} predicts something other than floating-point "
                    f"numbers of the latents' shape {tuple(latents.shape)}; CFG parallelism cannot "
                    "hand that on"
                )
            self._dtypes[key] = PREDICTION_DTYPES[code]
        return self._dtypes[key]


def guidance_for(group: Group, call: Caller = call_plainly) -> ClassifierFreeGuidance:
    """Guidance on one rank, or on two if ``group`` has them."""
    return ClassifierFreeGuidance(call) if group.size == 1 else ParallelGuidance(group, call)


def _guided(
    config: PipelineConfig, batch: Req, positive: Tensor, negative: Tensor, scale: float | None
) -> Tensor:
    scale = batch.true_cfg_scale if scale is None else scale
    guided = negative + scale * (positive - negative)
    if not config.guidance_keeps_norm:
        return guided
    return guided * (positive.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
