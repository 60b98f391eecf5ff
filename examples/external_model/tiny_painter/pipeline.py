"""Which components a checkpoint has, and the stages that a request goes through."""

from __future__ import annotations

from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.server_args import ServerArgs


class TinyPainterPipeline(ComposedPipelineBase):
    """Text to image on the shared stages."""

    pipeline_name = "TinyPainterPipeline"

    _required_config_modules = ["text_encoder", "tokenizer", "transformer", "scheduler", "vae"]

    def create_pipeline_stages(self, server_args: ServerArgs) -> None:
        """Every stage is the shared one."""
        self.add_standard_t2i_stages()
