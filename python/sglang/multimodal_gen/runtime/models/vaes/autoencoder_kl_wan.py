"""``AutoencoderKLWan``: the causal video VAE of Wan 2.1, and the residual one of 2.2's 5B."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.autoencoders import autoencoder_kl_wan
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.memory.layerwise import LayerwiseOffloadableModuleMixin
from sglang.multimodal_gen.runtime.models.vaes.channels_last.causal_video import (
    causal_video_forwards,
)
from sglang.multimodal_gen.runtime.models.vaes.channels_last.install import in_channels_last
from sglang.multimodal_gen.runtime.models.vaes.chunks import join_chunks
from sglang.multimodal_gen.runtime.models.vaes.parallel.causal_video import causal_video_planners
from sglang.multimodal_gen.runtime.models.vaes.parallel_tiled_vae import (
    ParallelTiledVAE,
    Tiling,
)

TILE, TILE_STRIDE = 256, 192
"""Pixels; the reference's defaults, which no checkpoint overrides."""


class AutoencoderKLWan(  # pyright: ignore[reportIncompatibleMethodOverride]
    ParallelTiledVAE, autoencoder_kl_wan.AutoencoderKLWan, LayerwiseOffloadableModuleMixin
):
    """Diffusers' module, with this runtime's ways to run it.

    Frames go through it in chunks: the first alone, then as many as make one latent frame. What a
    convolution must remember of earlier frames is kept for one call, where the library keeps it on
    the module.

    Paper: Wan Team, "Wan: Open and Advanced Large-Scale Video Generative Models" (2025), 4.1.
    """

    layer_names = ["encoder.down_blocks", "decoder.up_blocks"]
    layerwise_offload_dit_group_enabled = False
    row_planners = causal_video_planners(autoencoder_kl_wan, "Wan")
    layer_forwards = causal_video_forwards(autoencoder_kl_wan, "Wan")

    @property
    def temporal_compression_ratio(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Frames that make a latent frame, after the first."""
        return self.config["scale_factor_temporal"]

    def default_tiling(self) -> Tiling:
        """Tiles of the size that the reference uses, a quarter of it shared with the next."""
        return Tiling(TILE, TILE, TILE_STRIDE, TILE_STRIDE)

    @in_channels_last
    def _encode(self, x: Tensor) -> Tensor:
        """Pixels [B, 3, F, H, W] to moments [B, 2C, T, h, w]."""
        if self._patch is not None:
            x = autoencoder_kl_wan.patchify(x, self._patch)
        chunk = self.temporal_compression_ratio
        first, rest = x[:, :, :1], x[:, :, 1:]
        whole = rest.shape[2] // chunk * chunk  # the reference leaves out what fills no chunk
        chunks = [first, *rest[:, :, :whole].split(chunk, dim=2)] if whole else [first]
        memory = _Memory(self.encoder)
        return self.quant_conv(torch.cat([memory.run(frames) for frames in chunks], dim=2))

    @in_channels_last
    def _decode(self, z: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Latents [B, C, T, h, w] to pixels [B, 3, F, H, W] in -1..1."""
        memory = _Memory(self.decoder)
        latents = self.post_quant_conv(z).split(1, dim=2)
        chunks = (memory.run(part, first_chunk=i == 0) for i, part in enumerate(latents))
        return join_chunks(map(self._pixels, chunks), len(latents))

    def _pixels(self, chunk: Tensor) -> Tensor:
        """What the decoder made of one latent frame, unfolded and cut to -1..1."""
        if self._patch is not None:
            chunk = autoencoder_kl_wan.unpatchify(chunk, self._patch)
        return chunk.clamp(-1.0, 1.0)

    @property
    def _patch(self) -> int | None:
        """Pixels along an edge that are channels of one; None where a pixel is one."""
        return self.config["patch_size"]


class _Memory:
    """What an encoder's or decoder's causal convolutions saw last, for the chunks of one clip."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        convolutions = (
            isinstance(m, autoencoder_kl_wan.WanCausalConv3d) for m in network.modules()
        )
        self.seen: list[Tensor | str | None] = [None] * sum(convolutions)

    def run(self, frames: Tensor, **kwargs: Any) -> Tensor:
        """One chunk, which goes on from those before it."""
        return self.network(frames, feat_cache=self.seen, feat_idx=[0], **kwargs)


EntryClass = AutoencoderKLWan
