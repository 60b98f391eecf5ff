"""``AutoencoderKLQwenImage``: a causal video autoencoder, used for single pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.autoencoders import autoencoder_kl_qwenimage
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.memory.layerwise import LayerwiseOffloadableModuleMixin
from sglang.multimodal_gen.runtime.models.vaes.channels_last.causal_video import (
    causal_video_forwards,
)
from sglang.multimodal_gen.runtime.models.vaes.channels_last.install import in_channels_last
from sglang.multimodal_gen.runtime.models.vaes.parallel.causal_video import causal_video_planners
from sglang.multimodal_gen.runtime.models.vaes.parallel_tiled_vae import (
    ParallelTiledVAE,
    Tiling,
)

FIRST_CHUNK = 1
"""Frames of a clip's first chunk; it stands alone."""


class AutoencoderKLQwenImage(  # pyright: ignore[reportIncompatibleMethodOverride]
    ParallelTiledVAE,
    autoencoder_kl_qwenimage.AutoencoderKLQwenImage,
    LayerwiseOffloadableModuleMixin,
):
    """Diffusers' module, with this runtime's ways to run it.

    Pictures are clips [B, C, 1, H, W] of one frame, for which nothing is cached.
    """

    layer_names = ["encoder.down_blocks", "decoder.up_blocks"]
    layerwise_offload_dit_group_enabled = False
    row_planners = causal_video_planners(autoencoder_kl_qwenimage, "QwenImage")
    layer_forwards = causal_video_forwards(autoencoder_kl_qwenimage, "QwenImage")

    @property
    def temporal_compression_ratio(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
    ) -> int:
        """Frames of a latent frame, but for the first."""
        return 2 ** sum(self.config["temperal_downsample"])

    def default_tiling(self) -> Tiling:
        """Diffusers' tiles."""
        return Tiling(
            self.tile_sample_min_height,
            self.tile_sample_min_width,
            int(self.tile_sample_stride_height),
            int(self.tile_sample_stride_width),
        )

    def decode(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, z: Tensor, return_dict: bool = True
    ) -> DecoderOutput | tuple[Tensor]:
        """Latents, in the VAE's own scale, to pixels; cut to -1..1 where they are whole."""
        (sample,) = super().decode(z, return_dict=False)
        if self.tiling is None:
            sample = sample.clamp(-1, 1)
        return DecoderOutput(sample=sample) if return_dict else (sample,)

    def spatial_shard_decode(self, z: Tensor) -> Tensor:
        """A band of rows on each rank, cut to -1..1 as a whole picture is."""
        return super().spatial_shard_decode(z).clamp(-1, 1)

    @in_channels_last
    def _encode(self, x: Tensor) -> Tensor:
        return self.quant_conv(_in_chunks(self.encoder, x, self.temporal_compression_ratio))

    @in_channels_last
    def _decode(self, z: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _in_chunks(self.decoder, self.post_quant_conv(z), 1)


def _in_chunks(network: Callable[..., Tensor], x: Tensor, frames: int) -> Tensor:
    """The first frame, then ``frames`` at a time; each chunk sees the last frames before it."""
    first, rest = x[:, :, :FIRST_CHUNK], x[:, :, FIRST_CHUNK:]
    if not rest.shape[2]:
        return network(first)
    assert isinstance(network, nn.Module)
    convolution = autoencoder_kl_qwenimage.QwenImageCausalConv3d
    cache: list[Any] = [None for m in network.modules() if isinstance(m, convolution)]
    chunks = (first, *rest.split(frames, dim=2))
    return torch.cat([network(chunk, feat_cache=cache, feat_idx=[0]) for chunk in chunks], dim=2)


EntryClass = AutoencoderKLQwenImage
