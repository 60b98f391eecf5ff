"""``AutoencoderKLQwenImage21``: 16 times smaller along an edge, with transparency; pictures alone.

The design is that of Wan 2.2's residual autoencoder, whose convolutions look at one frame here.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.autoencoders import autoencoder_kl_qwenimage21 as library
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor

from sglang.multimodal_gen.runtime.layers.parallel_conv import convolve_padded_rows, row_window
from sglang.multimodal_gen.runtime.layers.row_shard import RowShards
from sglang.multimodal_gen.runtime.memory.layerwise import LayerwiseOffloadableModuleMixin
from sglang.multimodal_gen.runtime.models.vaes.channels_last.causal_video import (
    causal_video_forwards,
)
from sglang.multimodal_gen.runtime.models.vaes.channels_last.install import in_channels_last
from sglang.multimodal_gen.runtime.models.vaes.parallel.causal_video import causal_video_planners
from sglang.multimodal_gen.runtime.models.vaes.parallel.row_modules import (
    ROW_BY_ROW,
    RowPlan,
    row_by_row,
)
from sglang.multimodal_gen.runtime.models.vaes.parallel_tiled_vae import (
    ParallelTiledVAE,
    Tiling,
)


def _plan_convolution(conv: Any) -> RowPlan:
    """A ``Conv2d`` that takes clips of one frame, and pads by ``_padding``."""
    halo = max(row_window(conv, conv._padding[2:4]).halo)
    return RowPlan(_convolve, halo=halo) if halo else ROW_BY_ROW


def _convolve(conv: Any, shards: RowShards, x: Tensor, cache_x: None = None) -> Tensor:
    return convolve_padded_rows(conv, shards, x.squeeze(2), conv._padding).unsqueeze(2)


class AutoencoderKLQwenImage21(  # pyright: ignore[reportIncompatibleMethodOverride]
    ParallelTiledVAE, library.AutoencoderKLQwenImage21, LayerwiseOffloadableModuleMixin
):
    """Diffusers' module, with this runtime's ways to run it.

    Pictures are clips [B, C, 1, H, W] of one frame; C is 4 where transparency is among them.
    """

    layer_names = ["encoder.down_blocks", "decoder.up_blocks"]
    layerwise_offload_dit_group_enabled = False
    row_planners = {
        **causal_video_planners(library, "QwenImage21"),
        library.QwenImage21CausalConv3d: _plan_convolution,
        library.QwenImage21AvgDown3D: row_by_row,
        library.QwenImage21DupUp3D: row_by_row,
    }
    layer_forwards = causal_video_forwards(library, "QwenImage21")

    @property
    def temporal_compression_ratio(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
    ) -> int:
        """Frames that would make a latent frame; a picture is a clip's first alone."""
        return self.config["scale_factor_temporal"]

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
        """Latents, in the VAE's own scale, to pixels, cut to -1..1."""
        (sample,) = super().decode(z, return_dict=False)
        sample = sample.clamp(-1, 1)
        return DecoderOutput(sample=sample) if return_dict else (sample,)

    def spatial_shard_decode(self, z: Tensor) -> Tensor:
        """A band of rows on each rank, cut to -1..1 as a whole picture is."""
        return super().spatial_shard_decode(z).clamp(-1, 1)

    def parallel_tiled_decode(self, z: Tensor, group: Any) -> Tensor:
        """Tiles dealt to the ranks, cut to -1..1 as on one."""
        return super().parallel_tiled_decode(z, group).clamp(-1, 1)

    @in_channels_last
    def _encode(self, x: Tensor) -> Tensor:
        return self.quant_conv(self.encoder(self._folded(x, library._patchify)))

    @in_channels_last
    def _decode(self, z: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        picture = self.decoder(self.post_quant_conv(z), first_chunk=True)
        return self._folded(picture, library._unpatchify)

    def _folded(self, x: Tensor, fold: Any) -> Tensor:
        """Pixels as channels of fewer, or back; where the checkpoint says so."""
        patch = self.config["patch_size"]
        return x if patch is None else fold(x, patch_size=patch)


EntryClass = AutoencoderKLQwenImage21
