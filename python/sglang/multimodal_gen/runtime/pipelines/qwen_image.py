"""Qwen-Image: text to image, and edits of one picture or several."""

from __future__ import annotations

from typing import ClassVar

from sglang.multimodal_gen.configs.pipeline_configs.qwen_image import VAE_AREA
from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    ComponentLoader,
    ComponentSpec,
)
from sglang.multimodal_gen.runtime.loader.component_loaders.text_encoder_loader import (
    TextEncoderLoader,
)
from sglang.multimodal_gen.runtime.models.encoders.qwen2_5_vl import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLTextEncoder,
)
from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.pipelines_core.lora_pipeline import LoRAPipeline
from sglang.multimodal_gen.runtime.pipelines_core.stages.chat_text_encoding import (
    ChatTextEncodingStage,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.reference_encoding import (
    ReferenceEncodingStage,
)
from sglang.multimodal_gen.runtime.server_args import ServerArgs


class BlindTextEncoderLoader(TextEncoderLoader):
    """Loads the language model without its vision tower, which text to image does not use."""

    def model_class(self, spec: ComponentSpec) -> type:
        """Of another encoder that was put in its place, that one's own class."""
        found = super().model_class(spec)
        return Qwen2_5_VLTextEncoder if found is Qwen2_5_VLForConditionalGeneration else found


class QwenImagePipeline(LoRAPipeline, ComposedPipelineBase):
    """Text to image."""

    pipeline_name = "QwenImagePipeline"

    _required_config_modules = ["text_encoder", "tokenizer", "transformer", "scheduler", "vae"]
    component_loaders: ClassVar[dict[str, type[ComponentLoader]]] = {
        "text_encoder": BlindTextEncoderLoader
    }

    def create_pipeline_stages(self, server_args: ServerArgs) -> None:
        """The shared stages; a chat in place of bare prompts."""
        self.add_standard_input_validation_stage()
        self.add_stage(
            ChatTextEncodingStage(
                self._required("text_encoder"),
                self._required("tokenizer"),
                self.get_module("processor"),
            ),
            "text_encoding_stage",
        )
        self.add_reference_stages(server_args)
        self._add_from_latents_on()

    def add_reference_stages(self, server_args: ServerArgs) -> None:
        """Text to image has no references."""


class QwenImageEditPipeline(QwenImagePipeline):
    """An edit of one picture."""

    pipeline_name = "QwenImageEditPipeline"

    _required_config_modules = [*QwenImagePipeline._required_config_modules, "processor"]
    component_loaders: ClassVar[dict[str, type[ComponentLoader]]] = {}

    def add_reference_stages(self, server_args: ServerArgs) -> None:
        """The pictures' latents."""
        stage = ReferenceEncodingStage(
            self._required("vae"), VAE_AREA, self.parallel, server_args.vae
        )
        self.add_stage(stage, "reference_encoding_stage")


class QwenImageEditPlusPipeline(QwenImageEditPipeline):
    """A picture made of several (2509, 2511)."""

    pipeline_name = "QwenImageEditPlusPipeline"


EntryClass = [QwenImagePipeline, QwenImageEditPipeline, QwenImageEditPlusPipeline]
