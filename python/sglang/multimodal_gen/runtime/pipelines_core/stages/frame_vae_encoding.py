"""Given frames of a clip, and whole given clips, to latents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor

from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stages.image_vae_encoding import to_pixels
from sglang.multimodal_gen.runtime.pipelines_core.stages.vae_encoding import VAEEncodingStage
from sglang.multimodal_gen.runtime.pipelines_core.stages.vae_work import VAEWork
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest
from sglang.multimodal_gen.runtime.utils.video_file import load_input_video

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.server_args import ServerArgs


class FrameVAEEncodingStage(VAEEncodingStage):
    """Encodes the frames of a clip that a request gives: its first, and perhaps its last.

    Where the family encodes images alone, the first frame is all; else the clip has zeros (grey)
    where nothing is given. Writes None without an input image.
    """

    reads = frozenset({"condition_image", "height", "width", "num_frames", "seeds"})
    writes = frozenset({"image_latent"})

    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        """Writes float32 [B, C, T, h, w] in the denoiser's scale; T is 1 for images alone."""
        if not batch.condition_image:
            batch.image_latent = None
            return batch
        config = self.pipeline_config(server_args)
        frames = [to_pixels(i, batch.width, batch.height) for i in batch.condition_image]
        clip = frames[0][:, :, None]
        if not config.encodes_images_alone:
            first, *last = frames
            clip = first.new_zeros(1, 3, batch.num_frames, batch.height, batch.width)
            clip[:, :, 0] = first
            if last:
                clip[:, :, -1] = last[0]
        latents = encoded(self.work, config, clip)
        batch.image_latent = latents.repeat_interleave(batch.batch_size, dim=0)
        return batch


class VideoVAEEncodingStage(FrameVAEEncodingStage):
    """Encodes the clip that a request gives, from its first frame on; None without one."""

    reads = frozenset({"video_path", "height", "width", "num_frames", "seeds"})
    writes = frozenset({"image_latent", "video_latent", "num_frames"})

    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        """Writes float32 [B, C, T, h, w] in the denoiser's scale.

        Of a clip that is shorter than asked for, as many frames are taken as the model can make.

        Raises:
            InvalidRequest: the file is no video that can be read.
        """
        if not batch.video_path:
            batch.video_latent = None
            return batch
        config = self.pipeline_config(server_args)
        if len(batch.video_path) > 1:
            problem = f"{len(batch.video_path)} clips are given; this task takes one"
            raise InvalidRequest("video_path", batch.video_path, problem)
        frames = load_input_video(batch.video_path[0]).frames
        if len(frames) < batch.num_frames:
            kept = (len(frames) - 1) // config.frame_multiple * config.frame_multiple + 1
            batch.warnings.append(
                f"the input video has {len(frames)} frames: {kept} are made, not {batch.num_frames}"
            )
            batch.num_frames = kept
        images = (Image.fromarray(frame) for frame in frames[: batch.num_frames])
        clip = torch.stack([to_pixels(i, batch.width, batch.height) for i in images], dim=2)
        latents = encoded(self.work, config, clip)
        batch.video_latent = latents.repeat_interleave(batch.batch_size, dim=0)
        return batch


def encoded(work: VAEWork, config: PipelineConfig, clip: Tensor) -> Tensor:
    """A clip [1, 3, F, H, W] in -1..1 as the mode of its latents, in the denoiser's scale."""
    parameter = next(work.vae.parameters())
    latents = work.encode(clip.to(parameter)).float()
    scale, shift = config.get_decode_scale_and_shift(latents.device, latents.dtype, work.vae)
    return (latents - shift) * scale
