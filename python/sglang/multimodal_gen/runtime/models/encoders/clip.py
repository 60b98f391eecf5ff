"""CLIP's text encoder: Transformers' module, with a table that deals it over ranks.

Paper: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision"
(2021).
"""

from __future__ import annotations

import transformers

from sglang.multimodal_gen.runtime.layers.tensor_parallel import Column, Divided, Row, Vocab


class CLIPTextModel(transformers.CLIPTextModel):
    """The text tower."""

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: the library's table of old parameter names holds for it."""
        return False


TP_PLAN = {
    "embeddings.token_embedding": Vocab(),
    "encoder.layers.*.self_attn.[qkv]_proj": Column(heads="num_attention_heads"),
    "encoder.layers.*.self_attn.out_proj": Row(),
    "encoder.layers.*.self_attn": Divided("num_heads"),
    "encoder.layers.*.mlp.fc1": Column(),
    "encoder.layers.*.mlp.fc2": Row(),
}

EntryClass = CLIPTextModel
