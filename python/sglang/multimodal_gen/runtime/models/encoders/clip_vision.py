"""CLIP's image encoder: Transformers' module, dealt over ranks and streamed by tables.

Paper: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision"
(2021).
"""

from __future__ import annotations

import transformers

from sglang.multimodal_gen.runtime.layers.tensor_parallel import Column, Divided, Row
from sglang.multimodal_gen.runtime.memory.layerwise import LayerwiseOffloadableModuleMixin


class CLIPVisionModel(transformers.CLIPVisionModel, LayerwiseOffloadableModuleMixin):
    """The vision tower."""

    layer_names = ["encoder.layers"]
    layerwise_offload_dit_group_enabled = False

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: the library's table of old parameter names holds for it."""
        return False


# A patch embedding is a convolution, small beside the layers: each rank holds all of it.
TP_PLAN = {
    "encoder.layers.*.self_attn.[qkv]_proj": Column(heads="num_attention_heads"),
    "encoder.layers.*.self_attn.out_proj": Row(),
    "encoder.layers.*.self_attn": Divided("num_heads"),
    "encoder.layers.*.mlp.fc1": Column(),
    "encoder.layers.*.mlp.fc2": Row(),
}

EntryClass = CLIPVisionModel
