"""The shared stages, under the names that porters import."""

from sglang.multimodal_gen.runtime.pipelines_core.stages.decoding import DecodingStage
from sglang.multimodal_gen.runtime.pipelines_core.stages.denoising import DenoisingStage
from sglang.multimodal_gen.runtime.pipelines_core.stages.frame_vae_encoding import (
    FrameVAEEncodingStage,
    VideoVAEEncodingStage,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.image_encoding import ImageEncodingStage
from sglang.multimodal_gen.runtime.pipelines_core.stages.image_vae_encoding import (
    ImageVAEEncodingStage,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.input_validation import (
    InputValidationStage,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.latent_preparation import (
    LatentPreparationStage,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.strength import StrengthStage
from sglang.multimodal_gen.runtime.pipelines_core.stages.text_encoding import TextEncodingStage
from sglang.multimodal_gen.runtime.pipelines_core.stages.timestep_preparation import (
    TimestepPreparationStage,
)

__all__ = [
    "DecodingStage",
    "DenoisingStage",
    "FrameVAEEncodingStage",
    "ImageEncodingStage",
    "ImageVAEEncodingStage",
    "InputValidationStage",
    "LatentPreparationStage",
    "StrengthStage",
    "TextEncodingStage",
    "TimestepPreparationStage",
    "VideoVAEEncodingStage",
]
