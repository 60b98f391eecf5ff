"""Wan 2.1 and 2.2 on the shared stages: text, images and clips to video."""

from __future__ import annotations

from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.pipelines_core.lora_pipeline import LoRAPipeline
from sglang.multimodal_gen.runtime.server_args import ServerArgs


class WanPipeline(LoRAPipeline, ComposedPipelineBase):
    """Text to video; 2.2's 14B has two experts, its 5B takes a first frame too."""

    pipeline_name = "WanPipeline"

    _required_config_modules = ["text_encoder", "tokenizer", "transformer", "scheduler", "vae"]
    _optional_config_modules = ["transformer_2"]

    def create_pipeline_stages(self, server_args: ServerArgs) -> None:
        """Every stage is the shared one."""
        self.add_standard_ti2v_stages()


class WanImageToVideoPipeline(WanPipeline):
    """Image to video; 2.1 looks at the image with CLIP too."""

    pipeline_name = "WanImageToVideoPipeline"

    _optional_config_modules = ["transformer_2", "image_encoder", "image_processor"]


EntryClass = [WanPipeline, WanImageToVideoPipeline]
