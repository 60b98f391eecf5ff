"""How the denoiser's predictions become one: with or without classifier-free guidance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class ClassifierFreeGuidance:
    """``negative + scale * (positive - negative)``, Ho and Salimans 2022.

    Two forwards of their own, as in the reference, so that a branch may have its own text length.
    Without guidance the second forward is not paid for.
    """

    def predict(
        self,
        transformer: nn.Module,
        config: PipelineConfig,
        batch: Req,
        latent_model_input: Tensor,
        t_B: Tensor,
    ) -> Tensor:
        """The prediction for one step, in the shape of the latents."""
        positive = _call(
            transformer, config.prepare_pos_cond_kwargs(batch, latent_model_input, t_B)
        )
        if not batch.do_classifier_free_guidance:
            return positive
        negative = _call(
            transformer, config.prepare_neg_cond_kwargs(batch, latent_model_input, t_B)
        )
        return negative + batch.true_cfg_scale * (positive - negative)


def _call(transformer: nn.Module, kwargs: Mapping[str, Any]) -> Tensor:
    output = transformer(**kwargs)
    if isinstance(output, Tensor):
        return output
    return output[0]  # Diffusers' classes return a tuple or an output record
