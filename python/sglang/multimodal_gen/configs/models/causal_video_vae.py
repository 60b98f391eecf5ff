"""Facts of the causal video autoencoders whose configs Diffusers writes alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from sglang.multimodal_gen.configs.models.base import VAEConfig
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError


@dataclass
class CausalVideoVAEConfig(VAEConfig):
    """An autoencoder of clips whose latents have a mean and a deviation of their own, by channel.

    Field names are those of ``config.json`` (``z_dim``, ``scale_factor_spatial`` ...).
    """

    z_dim: int = 16
    scale_factor_spatial: int = 8
    scale_factor_temporal: int = 4
    latents_mean: tuple[float, ...] = (0.0,) * 16
    latents_std: tuple[float, ...] = (1.0,) * 16

    def __post_init__(self) -> None:
        self.latent_channels = self.z_dim
        self.temporal_compression_ratio = self.scale_factor_temporal
        super().__post_init__()
        ratio = self.scale_factor_spatial
        if isinstance(ratio, bool) or not isinstance(ratio, int) or ratio < 1:
            raise CheckpointError(
                f"the VAE's config.json: scale_factor_spatial={ratio!r} must be 1 or more"
            )
        for name in ("latents_mean", "latents_std"):
            values = getattr(self, name)
            if len(values) != self.z_dim:
                raise CheckpointError(
                    f"the VAE's config.json: {name} has {len(values)} values for "
                    f"z_dim={self.z_dim} channels"
                )

    @property
    def spatial_compression_ratio(self) -> int:
        """Pixels per latent pixel along an edge."""
        return self.scale_factor_spatial

    def with_checkpoint(self, config: Mapping[str, Any]) -> Self:
        """A copy with the checkpoint's facts; lists become tuples."""
        return super().with_checkpoint(
            {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}
        )
