"""Facts of a component that the pipeline needs before its weights are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self


@dataclass
class ModelConfig:
    """Base of component configs: the fields of ``config.json`` that a pipeline config reads.

    The checkpoint is the owner of these facts; the defaults only serve where there is no checkpoint
    (listing a pipeline's stages, tests on stub modules).
    """

    def with_checkpoint(self, config: Mapping[str, Any]) -> Self:
        """A copy with every declared field that ``config.json`` also holds."""
        found = {f.name: config[f.name] for f in fields(self) if f.name in config}
        return replace(self, **found)


@dataclass
class DiTConfig(ModelConfig):
    """A denoising transformer."""

    in_channels: int = 64


@dataclass
class VAEConfig(ModelConfig):
    """An image autoencoder."""

    latent_channels: int = 16
    block_out_channels: tuple[int, ...] = (128, 256, 512, 512)
    scaling_factor: float = 1.0
    shift_factor: float | None = None

    @property
    def spatial_compression_ratio(self) -> int:
        """Pixels per latent pixel along an edge: each level but the last halves the picture."""
        return 2 ** (len(self.block_out_channels) - 1)


@dataclass
class EncoderConfig(ModelConfig):
    """A text encoder, and how a prompt goes through it.

    ``max_length`` is the number of tokens that every prompt is padded or cut to; None takes the
    request's ``max_sequence_length``. ``output`` names the member of the encoder's output that is
    used: "pooler_output" [B, P] goes to the pooled embeddings, any other [B, T, D] to the prompt's.
    """

    max_length: int | None = None
    max_length_limit: int | None = None
    output: str = "last_hidden_state"
    use_attention_mask: bool = True
