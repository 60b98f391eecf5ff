"""FLUX.1: text to image on the shared stages."""

from __future__ import annotations

from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.pipelines_core.lora_pipeline import LoRAPipeline
from sglang.multimodal_gen.runtime.server_args import ServerArgs


class FluxPipeline(LoRAPipeline, ComposedPipelineBase):
    """FLUX.1-dev and FLUX.1-schnell."""

    pipeline_name = "FluxPipeline"

    _required_config_modules = [
        "text_encoder",
        "text_encoder_2",
        "tokenizer",
        "tokenizer_2",
        "transformer",
        "scheduler",
        "vae",
    ]

    def create_pipeline_stages(self, server_args: ServerArgs) -> None:
        """Every stage is the shared one."""
        self.add_standard_t2i_stages()


EntryClass = [FluxPipeline]
