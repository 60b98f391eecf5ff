"""Facts of a FLUX.1 transformer's checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.multimodal_gen.configs.models.base import DiTConfig


@dataclass
class FluxDiTConfig(DiTConfig):
    """``guidance_embeds`` tells guidance-distilled checkpoints (dev) from others (schnell)."""

    guidance_embeds: bool = True
