"""What a caller may set, and what the shared stages ask about this family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.configs.pipeline_configs.base import ImagePipelineConfig
from sglang.multimodal_gen.configs.sample.sampling_params import ImageSamplingParams
from sglang.multimodal_gen.configs.task_type import ModelTaskType

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req


@dataclass
class TinyPainterSamplingParams(ImageSamplingParams):
    """Small pictures in few steps."""

    height: int | None = 64
    width: int | None = 64
    num_inference_steps: int = 4
    guidance_scale: float = 3.0
    max_sequence_length: int | None = 16


@dataclass
class TinyPainterPipelineConfig(ImagePipelineConfig):
    """Text to image, with classifier-free guidance where there is a negative prompt."""

    task_type: ModelTaskType = ModelTaskType.T2I
    should_use_guidance: bool = True

    def prepare_pos_cond_kwargs(
        self, batch: Req, latent_model_input: Tensor, t: Tensor, **kwargs: Any
    ) -> dict[str, Any]:
        """Exactly the arguments of the denoiser's ``forward``."""
        return {
            "hidden_states": latent_model_input,
            "encoder_hidden_states": batch.prompt_embeds[0],
            "timestep": t,
        }

    def prepare_neg_cond_kwargs(
        self, batch: Req, latent_model_input: Tensor, t: Tensor, **kwargs: Any
    ) -> dict[str, Any]:
        """The same for the negative prompt."""
        return {
            "hidden_states": latent_model_input,
            "encoder_hidden_states": batch.negative_prompt_embeds[0],
            "timestep": t,
        }
