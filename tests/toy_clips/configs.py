"""What a caller may set, and what the shared stages ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
from sglang.multimodal_gen.configs.sample.sampling_params import VideoSamplingParams
from sglang.multimodal_gen.configs.task_type import ModelTaskType

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req


@dataclass
class ToyClipsSamplingParams(VideoSamplingParams):
    height: int | None = 64
    width: int | None = 96
    num_frames: int = 9
    fps: int = 8
    num_inference_steps: int = 4
    guidance_scale: float = 3.0
    max_sequence_length: int | None = 16


@dataclass
class ToyClipsPipelineConfig(PipelineConfig):
    """Text to video, or from a first picture; frames come in fours and one."""

    supported_task_types = (ModelTaskType.T2V, ModelTaskType.I2V)
    task_type: ModelTaskType = ModelTaskType.T2V

    def prepare_pos_cond_kwargs(
        self, batch: Req, latent_model_input: Tensor, t: Tensor, **kwargs: Any
    ) -> dict[str, Any]:
        return _arguments(batch, latent_model_input, t, batch.prompt_embeds[0])

    def prepare_neg_cond_kwargs(
        self, batch: Req, latent_model_input: Tensor, t: Tensor, **kwargs: Any
    ) -> dict[str, Any]:
        return _arguments(batch, latent_model_input, t, batch.negative_prompt_embeds[0])


def _arguments(batch: Req, latents: Tensor, t: Tensor, text: Tensor) -> dict[str, Any]:
    return {
        "hidden_states": latents,
        "encoder_hidden_states": text,
        "timestep": t,
        "first_frame": batch.image_latent,
    }
