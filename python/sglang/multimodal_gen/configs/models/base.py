"""Facts of a component that the pipeline needs before its weights are there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from sglang.multimodal_gen.configs.sealed import Sealable
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, InvalidArgument
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean


@dataclass
class ModelConfig(Sealable):
    """Base of component configs: the fields of ``config.json`` that a pipeline config reads.

    The checkpoint is the owner of these facts; the defaults only serve where there is no checkpoint
    (listing a pipeline's stages, tests on stub modules).
    """

    def with_checkpoint(self, config: Mapping[str, Any]) -> Self:
        """A copy with every declared field that ``config.json`` also holds."""
        found = {f.name: config[f.name] for f in fields(self) if f.name in config}
        return replace(self, **found)

    def with_settings(self, settings: Mapping[str, Any], *, label: str) -> Self:
        """A copy with an operator's settings.

        Raises:
            InvalidArgument: a name is unknown; the nearest one is offered.
        """
        known = [f.name for f in fields(self)]
        for name, value in settings.items():
            if name not in known:
                problem = f"no such field.{did_you_mean(name, known)} It takes: {', '.join(known)}"
                raise InvalidArgument(f"{label}.{name}", value, problem)
        return replace(self, **settings)


@dataclass
class DiTConfig(ModelConfig):
    """A denoising transformer.

    ``guidance_embeds``: the checkpoint takes ``guidance_scale`` as an input (distilled guidance).
    """

    guidance_embeds: bool = False


@dataclass
class VAEConfig(ModelConfig):
    """An autoencoder of images or clips.

    ``in_channels``: 4 where transparency is among them.
    ``temporal_compression_ratio``: frames per latent frame, the first frame standing alone; 1 for
    images.
    """

    latent_channels: int = 16
    block_out_channels: tuple[int, ...] = (128, 256, 512, 512)
    scaling_factor: float = 1.0
    shift_factor: float | None = None
    temporal_compression_ratio: int = 1
    in_channels: int = 3

    def __post_init__(self) -> None:
        facts = {"scaling_factor": self.scaling_factor, "shift_factor": self.shift_factor or 0.0}
        for name, value in facts.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise CheckpointError(f"the VAE's config.json: {name}={value!r} must be a number")
            if not math.isfinite(value) or (name == "scaling_factor" and value <= 0):
                raise CheckpointError(f"the VAE's config.json: {name}={value!r} makes no sense")
        frames = self.temporal_compression_ratio
        if isinstance(frames, bool) or not isinstance(frames, int) or frames < 1:
            raise CheckpointError(
                f"the VAE's config.json: temporal_compression_ratio={frames!r} must be 1 or more"
            )
        channels = self.block_out_channels
        if not isinstance(channels, (list, tuple)) or not channels:
            raise CheckpointError(
                f"the VAE's config.json: block_out_channels={channels!r} must list its levels"
            )

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
    ``prompt_cleaning``: mend encodings, read HTML entities and join white space before tokenizing.
    ``zero_padding``: zeros stand for what the encoder makes of padding.
    """

    max_length: int | None = None
    max_length_limit: int | None = None
    output: str = "last_hidden_state"
    use_attention_mask: bool = True
    prompt_cleaning: bool = False
    zero_padding: bool = False
