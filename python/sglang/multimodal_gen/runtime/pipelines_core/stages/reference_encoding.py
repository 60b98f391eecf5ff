"""Input images to latents that the denoiser sees beside those it makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sglang.multimodal_gen.configs.picture_area import PictureArea
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stages.vae_encoding import VAEEncodingStage
from sglang.multimodal_gen.runtime.server_args.vae_section import VAEArgs

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.server_args import ServerArgs


class ReferenceEncodingStage(VAEEncodingStage):
    """Encodes each input image at its own size and shape: the mode of the posterior, in the
    denoiser's scale, packed and joined along the token axis in the order given.

    Args:
        vae: the autoencoder, of pictures or of clips.
        area: how large images are made.
        parallel: this rank's place; the replica's ranks encode together, and all have the latents.
        args: how they go about it.

    Raises:
        InvalidArgument: the VAE cannot do what ``args`` say.
    """

    reads = frozenset({"condition_image", "seeds", "prompt_embeds"})
    writes = frozenset({"image_latent", "image_latent_shapes"})

    def __init__(
        self,
        vae: Any,
        area: PictureArea,
        parallel: ParallelState | None = None,
        args: VAEArgs | None = None,
    ) -> None:
        super().__init__(vae, parallel, args)
        self.area = area

    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        """Writes latents, one copy for each output of the batch, and their shapes when unpacked."""
        config = self.pipeline_config(server_args)
        parameter = next(self.vae.parameters())
        scale, shift = config.get_decode_scale_and_shift(
            parameter.device, parameter.dtype, self.vae
        )
        packed: list[Tensor] = []
        for image in batch.condition_image:
            pixels = to_pixels(image, self.area, config.vae_config.in_channels).to(parameter)
            if config.vae_config.temporal_compression_ratio > 1:
                pixels = pixels.unsqueeze(2)  # a clip of one frame
            latents = (self.work.encode(pixels) - shift) * scale
            batch.image_latent_shapes.append(tuple(latents.shape))
            packed.append(config.maybe_pack_latents(latents, 1, batch))
        if packed:
            joined = torch.cat(packed, dim=1).to(batch.prompt_embeds[0].dtype)
            batch.image_latent = joined.repeat_interleave(batch.batch_size, dim=0)
        return batch


def to_pixels(image: Image.Image, area: PictureArea, channels: int) -> Tensor:
    """[1, channels, height, width] in -1..1, about as many pixels as ``area`` says; the fourth
    channel is what is opaque."""
    size = area.size_for(*image.size)
    resized = image.convert("RGBA" if channels == 4 else "RGB").resize(
        size, Image.Resampling.LANCZOS
    )
    pixels = torch.from_numpy(np.asarray(resized, dtype=np.float32) / 255) * 2 - 1
    return pixels.permute(2, 0, 1)[None]
