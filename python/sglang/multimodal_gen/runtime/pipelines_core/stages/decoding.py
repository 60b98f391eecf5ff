"""Latents to pictures and clips."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang.multimodal_gen.configs.task_type import DataType
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.layers.first_tensor import first_tensor
from sglang.multimodal_gen.runtime.pipelines_core.role import RoleType
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.pipelines_core.stages.finite import (
    require_finite,
    tell_failure,
)
from sglang.multimodal_gen.runtime.pipelines_core.stages.vae_work import VAEWork
from sglang.multimodal_gen.runtime.server_args.vae_section import VAEArgs
from sglang.multimodal_gen.runtime.utils.errors import OutOfMemory, PipelineDefinitionError

if TYPE_CHECKING:
    from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
    from sglang.multimodal_gen.runtime.server_args import ServerArgs

logger = logging.getLogger(__name__)


class DecodingStage(PipelineStage):
    """Decodes each image or clip by itself: a batch takes no more memory than one.

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
    reads = frozenset({"latents", "data_type"})
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
        """Writes pixels on the CPU, on helping ranks of no image.

        Images are float32 [B, C, H, W] in 0..1; clips, of latents with frames, are uint8
        [B, F, H, W, 3]. For an image task such latents have one frame, which is the image.

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
            pictures.append(_finished(picture, batch.data_type))
        batch.control.report("decode", batch.batch_size, batch.batch_size, "decoding")
        batch.output = torch.cat(pictures)
        return batch

    def decode(self, latents: Tensor) -> Tensor:
        """One image: [1, C, h, w] -> [1, 3, H, W] in -1..1; an empty tensor on helping ranks.

        A clip: [1, C, T, h, w] -> [1, 3, F, H, W].
        """
        return self.work.decode(latents)

    def _decode_together(self, latents: Tensor) -> Tensor:
        """The image on the first rank, none on the others, who are not left waiting for it."""
        if not self.work.needs_this_rank(latents):
            return latents.new_empty(0, 3, *(0 for _ in latents.shape[2:]))
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
    """The denoiser's latents [1, C, h, w] as pixels [1, 3, H, W] in 0..1, on the CPU; unchecked.

    Of latents with frames, the first alone, which a causal VAE can decode without the others.
    """
    if latents.ndim == 5:
        latents = latents[:, :, :1]
    picture = first_tensor(
        vae.decode(as_the_vae_takes_them(vae, config, latents), return_dict=False)
    )
    return to_unit_range(picture[:, :, 0] if picture.ndim == 5 else picture)


def as_the_vae_takes_them(vae: Any, config: PipelineConfig, latents: Tensor) -> Tensor:
    """Latents in the VAE's scale and dtype."""
    parameter = next(vae.parameters())
    scale, shift = config.get_decode_scale_and_shift(parameter.device, parameter.dtype, vae)
    return (latents / scale + shift).to(parameter.dtype)


def to_unit_range(picture: Tensor) -> Tensor:
    """Pixels in -1..1 as float32 in 0..1, on the CPU."""
    return (picture / 2 + 0.5).clamp(0, 1).float().cpu()


def to_frames(clip: Tensor) -> Tensor:
    """A clip [B, 3, F, H, W] in -1..1 as uint8 [B, F, H, W, 3], on the CPU.

    Frame by frame: beside the clip, no second one in float32 is made.
    """
    frames = [_to_bytes(frame) for frame in clip.unbind(2)]
    if not frames:
        return torch.empty(len(clip), 0, *clip.shape[3:], 3, dtype=torch.uint8)
    return torch.stack(frames, dim=1)


def _to_bytes(picture: Tensor) -> Tensor:
    """[B, 3, H, W] in -1..1 as uint8 [B, H, W, 3], rounded as images are."""
    unit = (picture / 2 + 0.5).clamp(0, 1).float()
    return (unit * 255).round().byte().permute(0, 2, 3, 1).cpu()


def _finished(picture: Tensor, data_type: DataType) -> Tensor:
    if picture.ndim == 4:
        return to_unit_range(picture)
    if data_type is not DataType.IMAGE:
        return to_frames(picture)
    if picture.shape[2] > 1:
        raise PipelineDefinitionError(
            f"an image task's latents were decoded to {picture.shape[2]} frames; the family must "
            "prepare latents of one"
        )
    return to_unit_range(picture[:, :, 0] if picture.shape[2] else picture.flatten(2, 3))
