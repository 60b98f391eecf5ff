"""T5's encoder: Transformers' module, with its blocks named for offload."""

from __future__ import annotations

import transformers

from sglang.multimodal_gen.runtime.memory.layerwise import LayerwiseOffloadableModuleMixin


class T5EncoderModel(transformers.T5EncoderModel, LayerwiseOffloadableModuleMixin):
    """The same computation under the same names."""

    layer_names = ["encoder.block"]
    layerwise_offload_dit_group_enabled = False

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: the library's table of old parameter names holds for it."""
        return False


EntryClass = T5EncoderModel
