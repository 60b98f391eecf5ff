"""UMT5's encoder: Transformers' module, dealt over ranks and streamed by tables.

Paper: Chung et al., "UniMax: Fairer and More Effective Language Sampling for Large-Scale
Multilingual Pretraining" (2023).
"""

from __future__ import annotations

import transformers

from sglang.multimodal_gen.runtime.layers.tensor_parallel import Column, Divided, Row, Vocab
from sglang.multimodal_gen.runtime.memory.layerwise import LayerwiseOffloadableModuleMixin


class UMT5EncoderModel(transformers.UMT5EncoderModel, LayerwiseOffloadableModuleMixin):
    """The encoder alone."""

    layer_names = ["encoder.block"]
    layerwise_offload_dit_group_enabled = False

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: the library's table of old parameter names holds for it."""
        return False


# Unlike T5, every layer has a position bias of its own; it has a column a head.
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

EntryClass = UMT5EncoderModel
