"""Hooks that are wrong in one place each."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.multimodal_gen.configs.pipeline_configs.flux import FluxPipelineConfig


@dataclass
class WholeConfig(FluxPipelineConfig):
    """Nothing is wrong."""


@dataclass
class ShiftlessConfig(FluxPipelineConfig):
    """The VAE's shift is forgotten."""

    def get_decode_scale_and_shift(self, device, dtype, vae):
        return super().get_decode_scale_and_shift(device, dtype, vae)[0], 0.0


@dataclass
class PositiveTwiceConfig(FluxPipelineConfig):
    """The negative branch gets the prompt's embeddings."""

    def prepare_neg_cond_kwargs(self, batch, latent_model_input, t, **kwargs):
        return self.prepare_pos_cond_kwargs(batch, latent_model_input, t, **kwargs)


@dataclass
class MisnamedConfig(FluxPipelineConfig):
    """One argument has a name of the porter's own."""

    def prepare_pos_cond_kwargs(self, batch, latent_model_input, t, **kwargs):
        arguments = super().prepare_pos_cond_kwargs(batch, latent_model_input, t, **kwargs)
        arguments["pooled_projection"] = arguments.pop("pooled_projections")
        return arguments


@dataclass
class PackedConfig(FluxPipelineConfig):
    """The latents stay packed after the loop."""

    def post_denoising_loop(self, latents, batch):
        return latents
