"""Input images to what an image encoder sees in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.pipelines_core.stages.finite import require_finite

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.server_args import ServerArgs


class ImageEncodingStage(PipelineStage):
    """Shows the input images to a vision encoder: its last layer but one, as CLIP is used.

    Writes None where there is no input image.

    Args:
        image_encoder: Transformers' vision model.
        image_processor: its processor: size, crop and normalisation are the checkpoint's.
    """

    uses = ("image_encoder",)
    reads = frozenset({"condition_image"})
    writes = frozenset({"image_embeds"})

    def __init__(self, image_encoder: Any, image_processor: Any) -> None:
        self.image_encoder = image_encoder
        self.image_processor = image_processor

    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        """Writes [images, tokens, D]: those of one request, which all its outputs share."""
        if not batch.condition_image:
            batch.image_embeds = None
            return batch
        images = [image.convert("RGB") for image in batch.condition_image]
        pixels = self.image_processor(images=images, return_tensors="pt").pixel_values
        seen = self.image_encoder(
            pixel_values=pixels.to(next(self.image_encoder.parameters())),
            output_hidden_states=True,
        )
        embeds = seen.hidden_states[-2]
        require_finite(embeds, f"{type(self.image_encoder).__name__}'s view of the input image")
        batch.image_embeds = embeds
        return batch
