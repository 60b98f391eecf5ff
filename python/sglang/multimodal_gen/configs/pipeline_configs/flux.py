"""FLUX.1 (dev and schnell): denoising and decoding as in Diffusers' ``FluxPipeline``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.configs.models.base import DiTConfig, EncoderConfig
from sglang.multimodal_gen.configs.pipeline_configs.base import (
    ImagePipelineConfig,
    resolution_shift,
)
from sglang.multimodal_gen.configs.sample.flux import (
    FluxSamplingParams,
    FluxSchnellSamplingParams,
)

if TYPE_CHECKING:
    from torch import Tensor

    from sglang.multimodal_gen.runtime.layers.rotary_embedding import Rotary
    from sglang.multimodal_gen.runtime.models.dits.flux import FluxTransformer2DModel
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req

CLIP_TOKENS = 77
T5_MAX_TOKENS = 512


@dataclass(frozen=True)
class FluxState:
    """What every step of one request shares: positions, and guidance [B] where it is embedded."""

    rotary: Rotary
    guidance: Tensor | None


@dataclass
class FluxPipelineConfig(ImagePipelineConfig):
    """CLIP gives the pooled vector, T5 the tokens; its padding is attended to, as in training."""

    should_use_guidance: bool = False
    dit_config: DiTConfig = field(default_factory=lambda: DiTConfig(guidance_embeds=True))
    text_encoder_configs: tuple[EncoderConfig, ...] = field(
        default_factory=lambda: (
            EncoderConfig(max_length=CLIP_TOKENS, output="pooler_output", use_attention_mask=False),
            EncoderConfig(max_length_limit=T5_MAX_TOKENS, use_attention_mask=False),
        )
    )
    vae_precision: str = "bf16"
    text_encoder_precisions: tuple[str, ...] = ("bf16", "bf16")

    def prepare_model_state(self, batch: Req, transformer: FluxTransformer2DModel) -> FluxState:
        """Positions of the joint sequence, and the embedded guidance."""
        import torch

        _, _, height, width = batch.raw_latent_shape
        embeds = batch.prompt_embeds[0]
        rotary = transformer.rotary_embedding(embeds.shape[1], height // 2, width // 2)
        if not transformer.guidance_embeds:
            return FluxState(rotary, None)
        guidance = torch.full((len(embeds),), batch.guidance_scale, device=embeds.device)
        return FluxState(rotary, guidance)

    def prepare_pos_cond_kwargs(
        self, batch: Req, latent_model_input: Tensor, t: Tensor, **kwargs: Any
    ) -> dict[str, Any]:
        """Arguments of ``FluxTransformer2DModel.forward`` for the prompt."""
        return _forward_kwargs(
            batch.model_state, latent_model_input, t, batch.prompt_embeds, batch.pooled_embeds
        )

    def prepare_neg_cond_kwargs(
        self, batch: Req, latent_model_input: Tensor, t: Tensor, **kwargs: Any
    ) -> dict[str, Any]:
        """The same for the negative prompt; the embedded guidance stays."""
        return _forward_kwargs(
            batch.model_state,
            latent_model_input,
            t,
            batch.negative_prompt_embeds,
            batch.neg_pooled_embeds,
        )

    def prepare_extra_set_timesteps_kwargs(
        self, batch: Req, scheduler_config: Mapping[str, Any]
    ) -> dict[str, Any]:
        """dev shifts time with the resolution; schnell does not."""
        if not scheduler_config.get("use_dynamic_shifting", False):
            return {}
        _, _, height, width = batch.raw_latent_shape
        return {"mu": resolution_shift((height // 2) * (width // 2), scheduler_config)}


def _forward_kwargs(
    state: FluxState, latents: Tensor, t: Tensor, embeds: list[Tensor], pooled: list[Tensor]
) -> dict[str, Any]:
    return {
        "hidden_states": latents,
        "encoder_hidden_states": embeds[0],
        "pooled_projections": pooled[0],
        # The reference rounds t to the latents' dtype before it divides.
        "timestep": t.to(latents.dtype) / 1000,
        "guidance": state.guidance,
        "rotary": state.rotary,
    }


def register() -> None:
    """Make FLUX.1 known to the registry."""
    from sglang.multimodal_gen.registry import register_configs

    register_configs(
        sampling_param_cls=FluxSamplingParams,
        pipeline_config_cls=FluxPipelineConfig,
        hf_model_paths=["black-forest-labs/FLUX.1-dev"],
        model_detectors=[lambda value: value == "fluxpipeline"],
    )
    register_configs(
        sampling_param_cls=FluxSchnellSamplingParams,
        pipeline_config_cls=FluxPipelineConfig,
        hf_model_paths=["black-forest-labs/FLUX.1-schnell"],
    )
