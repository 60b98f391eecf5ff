"""Latents to pictures."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.pipelines_core.role import RoleType
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.pipelines_core.stages.finite import (
    require_finite,
    tell_failure,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.vae_work import VAEWork
from sglang.multimodal_gen.runtime.server_args.vae_section import VAEArgs
from sglang.multimodal_gen.runtime.utils.errors import OutOfMemory

if TYPE_CHECKING:
    from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
    from sglang.multimodal_gen.runtime.server_args import ServerArgs

logger = logging.getLogger(__name__)


class DecodingStage(PipelineStage):
    """Decodes each image by itself: a batch takes no more memory than one.

    Args:
        vae: the autoencoder.
        parallel: this rank's place; the replica's ranks decode together, and its first has the
            pictures.
        args: how they go about it.

    Raises:
        InvalidArgument: the VAE cannot do what ``args`` say.
    """

    role_affinity = RoleType.DECODER
    uses = ("vae",)
    reads = frozenset({"latents"})
    writes = frozenset({"output"})

    def __init__(
        self, vae: Any, parallel: ParallelState | None = None, args: VAEArgs | None = None
    ) -> None:
        parallel = ParallelState.single() if parallel is None else parallel
        self.vae = vae
        self.control = parallel.control
        self.work = VAEWork(vae, parallel.replica, VAEArgs() if args is None else args)
        if parallel.replica.is_first:
            logger.info("the VAE works %s: %s", self.work.mode, self.work.reason)

    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        """Writes float32 pixels [B, C, H, W] in 0..1, on the CPU; on helping ranks no image.

        Raises:
            NonFiniteOutput: the latents or the picture hold NaN or infinity, on whichever rank.
            OutOfMemory: the picture is too large to be decoded like this; says what needs less.
        """
        config = self.pipeline_config(server_args)
        require_finite(batch.latents, "the denoiser's result", self.control)
        if self.work.mode_for(batch.latents) != self.work.mode:
            batch.warnings.append(
                f"{batch.latents.shape[-2]} rows of latents are too few for "
                f"{self.work.group.size} ranks: one decoded them"
            )
        pictures = []
        for index, latents in enumerate(batch.latents.split(1)):
            batch.control.report("decode", index, batch.batch_size, "decoding")
            picture = self._decode_together(as_the_vae_takes_them(self.vae, config, latents))
            require_finite(picture, "the VAE's picture", self.control)
            pictures.append(to_unit_range(picture))
        batch.control.report("decode", batch.batch_size, batch.batch_size, "decoding")
        batch.output = torch.cat(pictures)
        return batch

    def decode(self, latents: Tensor) -> Tensor:
        """One image: [1, C, h, w] -> [1, 3, H, W] in -1..1; an empty tensor on helping ranks."""
        return self.work.decode(latents)

    def _decode_together(self, latents: Tensor) -> Tensor:
        """The image on the first rank, none on the others, who are not left waiting for it."""
        if not self.work.needs_this_rank(latents):
            return latents.new_empty(0, 3, 0, 0)
        mode = self.work.mode_for(latents)
        try:
            return self.decode(latents)
        except BaseException as error:
            if mode == "plain":  # in the others all ranks are in it, and none waits here
                tell_failure(self.control)
            if mode != "tiled" and isinstance(error, torch.OutOfMemoryError):
                raise OutOfMemory(
                    f"decoding latents of {tuple(latents.shape[2:])} did not fit into the device's "
                    f"memory ({error}); --vae-mode tiled needs less, also on one GPU"
                ) from error
            raise


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
