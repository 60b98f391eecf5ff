"""Latents to pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.pipelines_core.role import RoleType
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.pipelines_core.stages.finite import require_finite

if TYPE_CHECKING:
    from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
    from sglang.multimodal_gen.runtime.server_args import ServerArgs


class DecodingStage(PipelineStage):
    """Decodes each image by itself: a batch takes no more memory than one."""

    role_affinity = RoleType.DECODER
    reads = frozenset({"latents"})
    writes = frozenset({"output"})

    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        """Writes float32 pixels [B, C, H, W] in 0..1, on the CPU.

        Raises:
            NonFiniteOutput: the latents or the picture hold NaN or infinity.
        """
        config = self.pipeline_config(server_args)
        require_finite(batch.latents, "the denoiser's result")
        pictures = []
        for index, latents in enumerate(batch.latents.split(1)):
            batch.control.report("decode", index, batch.batch_size, "decoding")
            picture = self.decode(as_the_vae_takes_them(self.vae, config, latents))
            require_finite(picture, "the VAE's picture")
            pictures.append(to_unit_range(picture))
        batch.control.report("decode", batch.batch_size, batch.batch_size, "decoding")
        batch.output = torch.cat(pictures)
        return batch

    def decode(self, latents: Tensor) -> Tensor:
        """One image: [1, C, h, w] -> [1, 3, H, W] in -1..1."""
        return _decoded(self.vae, latents)


def decode_latents(vae: Any, config: PipelineConfig, latents: Tensor) -> Tensor:
    """The denoiser's latents [1, C, h, w] as pixels [1, 3, H, W] in 0..1, on the CPU; unchecked."""
    return to_unit_range(_decoded(vae, as_the_vae_takes_them(vae, config, latents)))


def as_the_vae_takes_them(vae: Any, config: PipelineConfig, latents: Tensor) -> Tensor:
    """Latents in the VAE's scale and dtype."""
    parameter = next(vae.parameters())
    scale, shift = config.get_decode_scale_and_shift(parameter.device, parameter.dtype, vae)
    return (latents / scale + shift).to(parameter.dtype)


def to_unit_range(picture: Tensor) -> Tensor:
    """Pixels in -1..1 as float32 in 0..1, on the CPU."""
    return (picture / 2 + 0.5).clamp(0, 1).float().cpu()


def _decoded(vae: Any, latents: Tensor) -> Tensor:
    decoded = vae.decode(latents, return_dict=False)
    return decoded if isinstance(decoded, Tensor) else decoded[0]
