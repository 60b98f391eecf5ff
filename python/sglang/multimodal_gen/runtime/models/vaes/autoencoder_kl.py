"""The image VAE of most families: Diffusers' module, with its blocks named for offload."""

from __future__ import annotations

import diffusers

from sglang.multimodal_gen.runtime.memory.layerwise import LayerwiseOffloadableModuleMixin


class AutoencoderKL(diffusers.AutoencoderKL, LayerwiseOffloadableModuleMixin):
    """The same computation under the same names."""

    layer_names = ["encoder.down_blocks", "decoder.up_blocks"]
    layerwise_offload_dit_group_enabled = False


EntryClass = AutoencoderKL
