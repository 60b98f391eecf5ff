"""T5's encoder: Transformers' module, dealt over ranks and streamed by tables.

Paper: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer" (2020).
"""

from __future__ import annotations

import transformers

from sglang.multimodal_gen.runtime.layers.tensor_parallel import Column, Divided, Row, Vocab
from sglang.multimodal_gen.runtime.memory.layerwise import LayerwiseOffloadableModuleMixin


class T5EncoderModel(transformers.T5EncoderModel, LayerwiseOffloadableModuleMixin):
    """The encoder alone, gated or not."""

    layer_names = ["encoder.block"]
    layerwise_offload_dit_group_enabled = False

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: the library's table of old parameter names holds for it."""
        return False


# One position bias for all layers lives in the first; it has a column a head.
TP_PLAN = {
    "shared": Vocab(),
    "encoder.embed_tokens": Vocab(),
    "encoder.block.*.SelfAttention.[qkv]": Column(heads="num_heads"),
    "encoder.block.*.SelfAttention.o": Row(),
    "encoder.block.*.SelfAttention.relative_attention_bias": Column(heads="num_heads"),
    "encoder.block.*.SelfAttention": Divided("n_heads", "inner_dim"),
    "encoder.block.*.DenseReluDense.wi*": Column(),
    "encoder.block.*.DenseReluDense.wo": Row(),
}

EntryClass = T5EncoderModel
