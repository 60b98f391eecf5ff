"""Qwen-Image 2.1: pictures of text, and of text and pictures, with transparency."""

from __future__ import annotations

from typing import ClassVar

from sglang.multimodal_gen.configs.pipeline_configs.qwen_image import VAE_AREA
from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    ComponentLoader,
)
from sglang.multimodal_gen.runtime.loader.component_loaders.tokenizer_loader import (
    ProcessorTokenizerLoader,
)
from sglang.multimodal_gen.runtime.pipelines.qwen_image import QwenImagePipeline
from sglang.multimodal_gen.runtime.pipelines_core.stages import InputValidationStage
from sglang.multimodal_gen.runtime.pipelines_core.stages.reference_encoding import (
    ReferenceEncodingStage,
)
from sglang.multimodal_gen.runtime.server_args import ServerArgs


class QwenImage21Pipeline(QwenImagePipeline):
    """Text to image, and edits of several pictures; the tokenizer is the processor's."""

    pipeline_name = "QwenImage21Pipeline"

    _required_config_modules = [*QwenImagePipeline._required_config_modules, "processor"]
    _extra_config_module_map = {"tokenizer": "processor"}
    component_loaders: ClassVar[dict[str, type[ComponentLoader]]] = {
        "tokenizer": ProcessorTokenizerLoader
    }

    def add_standard_input_validation_stage(self) -> QwenImage21Pipeline:
        """Input images keep what is transparent: the VAE sees it."""
        return self.add_stage(InputValidationStage(keep_alpha=True), "input_validation_stage")

    def add_reference_stages(self, server_args: ServerArgs) -> None:
        """The pictures' latents."""
        stage = ReferenceEncodingStage(
            self._required("vae"), VAE_AREA, self.parallel, server_args.vae
        )
        self.add_stage(stage, "reference_encoding_stage")


EntryClass = QwenImage21Pipeline
