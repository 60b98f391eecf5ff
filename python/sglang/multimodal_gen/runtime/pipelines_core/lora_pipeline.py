"""Pipelines whose denoiser takes LoRA adapters."""

from __future__ import annotations

from typing import ClassVar

from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)


class LoRAPipeline(ComposedPipelineBase):
    """A pipeline that says which of its components adapters may change."""

    lora_targets: ClassVar[tuple[str, ...]] = ("transformer",)
