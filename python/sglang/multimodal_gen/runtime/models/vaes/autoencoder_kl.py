"""``AutoencoderKL``: the image VAE of Stable Diffusion, FLUX and many others."""

from __future__ import annotations

from diffusers.models.autoencoders import autoencoder_kl
from torch import Tensor

from sglang.multimodal_gen.runtime.memory.layerwise import LayerwiseOffloadableModuleMixin
from sglang.multimodal_gen.runtime.models.vaes.channels_last.image import IMAGE_FORWARDS
from sglang.multimodal_gen.runtime.models.vaes.channels_last.install import in_channels_last
from sglang.multimodal_gen.runtime.models.vaes.parallel.diffusers_spatial import IMAGE_PLANNERS
from sglang.multimodal_gen.runtime.models.vaes.parallel_tiled_vae import (
    ParallelTiledVAE,
    Tiling,
)


class AutoencoderKL(  # pyright: ignore[reportIncompatibleMethodOverride]
    ParallelTiledVAE, autoencoder_kl.AutoencoderKL, LayerwiseOffloadableModuleMixin
):
    """Diffusers' module, with this runtime's ways to run it.

    Paper: Rombach et al. 2022, High-Resolution Image Synthesis with Latent Diffusion Models.
    """

    layer_names = ["encoder.down_blocks", "decoder.up_blocks"]
    layerwise_offload_dit_group_enabled = False
    row_planners = IMAGE_PLANNERS
    layer_forwards = IMAGE_FORWARDS

    @property
    def spatial_compression_ratio(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
    ) -> int:
        """Each level but the last halves the picture."""
        return 2 ** (len(self.config["block_out_channels"]) - 1)

    def default_tiling(self) -> Tiling:
        """Tiles of the size that it was trained on, a quarter of it shared with the next."""
        size = self.config["sample_size"]
        ratio = self.spatial_compression_ratio
        edge = max(ratio, (size if isinstance(size, int) else size[0]) // ratio * ratio)
        stride = max(1, int(edge // ratio * (1 - self.tile_overlap_factor))) * ratio
        return Tiling(edge, edge, stride, stride)

    @in_channels_last
    def _encode(self, x: Tensor) -> Tensor:
        moments = self.encoder(x)
        return moments if self.quant_conv is None else self.quant_conv(moments)

    @in_channels_last
    def _decode(self, z: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.decoder(z if self.post_quant_conv is None else self.post_quant_conv(z))


EntryClass = AutoencoderKL
