"""Initial noise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.server_args import ServerArgs


class LatentPreparationStage(PipelineStage):
    """Draws each image's noise from its own generator, in the dtype of the prompt embeddings (or in
    float32, where the family says so).

    One draw of shape [1, ...] an image, on the CPU, then moved: as Diffusers' ``randn_tensor`` does
    with a list of CPU generators.
    """

    uses = ()
    reads = frozenset({"generator", "height", "width", "num_frames", "prompt_embeds", "task_type"})
    writes = frozenset({"latents", "raw_latent_shape"})

    def __init__(self, scheduler: Any = None, transformer: Any = None) -> None:
        # The denoiser is not kept: a stage that holds a component has it brought to the device.
        self.scheduler = scheduler

    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        """Writes packed latents on the embeddings' device, and their shape before packing."""
        config = self.pipeline_config(server_args)
        embeds = batch.prompt_embeds[0]
        dtype = torch.float32 if config.float32_latents else embeds.dtype
        size = len(batch.generator)
        shape = config.prepare_latent_shape(batch, size, batch.num_frames)
        noise = torch.cat(
            [
                torch.randn((1, *shape[1:]), generator=generator, dtype=dtype)
                for generator in batch.generator
            ]
        ).to(embeds.device)
        batch.raw_latent_shape = tuple(shape)
        batch.latents = config.maybe_pack_latents(noise, size, batch)
        return batch
