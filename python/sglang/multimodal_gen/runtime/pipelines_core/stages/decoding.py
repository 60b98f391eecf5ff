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
    from sglang.multimodal_gen.runtime.server_args import ServerArgs


class DecodingStage(PipelineStage):
    """Decodes each image by itself: a batch takes no more memory than one."""

    role_affinity = RoleType.DECODER
    uses = ("vae",)
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
        parameter = next(self.vae.parameters())
        scale, shift = config.get_decode_scale_and_shift(
            parameter.device, parameter.dtype, self.vae
        )
        require_finite(batch.latents, "the denoiser's result")
        pictures = []
        for index, latents in enumerate(batch.latents.split(1)):
            batch.control.report("decode", index, batch.batch_size, "decoding")
            picture = self.decode((latents / scale + shift).to(parameter.dtype))
            pictures.append(_to_unit_range(picture))
        batch.control.report("decode", batch.batch_size, batch.batch_size, "decoding")
        batch.output = torch.cat(pictures)
        return batch

    def decode(self, latents: Tensor) -> Tensor:
        """One image: [1, C, h, w] -> [1, 3, H, W] in -1..1."""
        decoded = self.vae.decode(latents, return_dict=False)
        return decoded if isinstance(decoded, Tensor) else decoded[0]


def _to_unit_range(picture: Tensor) -> Tensor:
    require_finite(picture, "the VAE's picture")
    return (picture / 2 + 0.5).clamp(0, 1).float().cpu()
