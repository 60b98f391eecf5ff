"""Every stage is the shared one."""

from __future__ import annotations

from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.server_args import ServerArgs


class ToyClipsPipeline(ComposedPipelineBase):
    pipeline_name = "ToyClipsPipeline"

    _required_config_modules = ["text_encoder", "tokenizer", "transformer", "scheduler", "vae"]

    def create_pipeline_stages(self, server_args: ServerArgs) -> None:
        self.add_standard_ti2i_stages()
