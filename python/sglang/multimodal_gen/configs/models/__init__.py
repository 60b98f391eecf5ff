"""Component configs: the names that porters import."""

from sglang.multimodal_gen.configs.models.base import (
    DiTConfig,
    EncoderConfig,
    ModelConfig,
    VAEConfig,
)

__all__ = ["DiTConfig", "EncoderConfig", "ModelConfig", "VAEConfig"]
