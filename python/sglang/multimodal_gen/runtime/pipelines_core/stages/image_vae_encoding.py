"""Input images to latents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stages.vae_encoding import VAEEncodingStage

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.server_args import ServerArgs


class ImageVAEEncodingStage(VAEEncodingStage):
    """Encodes the input images with the VAE: the mode of the posterior, in the denoiser's scale.

    Each image is resized (Lanczos) to the request's size; several are joined along the token axis
    in the order given. Writes None when there is no input image.
    """

    reads = frozenset({"condition_image", "height", "width", "seeds"})
    writes = frozenset({"image_latent"})

    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        """Writes packed latents of the images, one copy for each output of the batch."""
        if not batch.condition_image:
            batch.image_latent = None
            return batch
        config = self.pipeline_config(server_args)
        parameter = next(self.vae.parameters())
        scale, shift = config.get_decode_scale_and_shift(
            parameter.device, parameter.dtype, self.vae
        )
        packed = []
        for image in batch.condition_image:
            pixels = to_pixels(image, batch.width, batch.height).to(parameter)
            latents = (self.work.encode(pixels) - shift) * scale
            packed.append(config.maybe_pack_latents(latents, 1, batch))
        batch.image_latent = torch.cat(packed, dim=1).repeat_interleave(batch.batch_size, dim=0)
        return batch


def to_pixels(image: Image.Image, width: int, height: int) -> Tensor:
    """An image, resized (Lanczos), as [1, 3, height, width] in -1..1."""
    resized = image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    pixels = 2.0 * torch.from_numpy(np.asarray(resized, dtype=np.float32) / 255.0) - 1.0
    return pixels.permute(2, 0, 1)[None]
