"""CLIP's text encoder: Transformers' module, with its blocks named for offload."""

from __future__ import annotations

import transformers

from sglang.multimodal_gen.runtime.memory.layerwise import LayerwiseOffloadableModuleMixin


class CLIPTextModel(transformers.CLIPTextModel, LayerwiseOffloadableModuleMixin):
    """The same computation under the same names."""

    layer_names = ["encoder.layers"]
    layerwise_offload_dit_group_enabled = False

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: the library's table of old parameter names holds for it."""
        return False


EntryClass = CLIPTextModel
