"""Qwen3-VL as an encoder of text and pictures: Transformers' module, dealt over ranks by a table.

Paper: Qwen Team, "Qwen3-VL Technical Report" (2025).
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from sglang.multimodal_gen.runtime.layers.tensor_parallel import Column, Divided, Row, Vocab
from sglang.multimodal_gen.runtime.memory.layerwise import LayerwiseOffloadableModuleMixin
from sglang.multimodal_gen.runtime.models.encoders.qwen2_5_vl import SeesPictures


class Qwen3VLForConditionalGeneration(
    SeesPictures, transformers.Qwen3VLForConditionalGeneration, LayerwiseOffloadableModuleMixin
):
    """The vision tower and the language model, without its last norm and the head that predicts
    words: the denoisers that read it were trained on what its last layer says."""

    layer_names = ["model.language_model.layers", "model.visual.blocks"]
    layerwise_offload_dit_group_enabled = False
    _tied_weights_keys = None
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"^model\.language_model\.norm\."]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.lm_head
        self.model.language_model.norm = nn.Identity()
        # Where the table below looks for them.
        self.num_attention_heads: int = config.text_config.num_attention_heads
        self.num_key_value_heads: int = config.text_config.num_key_value_heads
        self.vision_heads: int = config.vision_config.num_heads

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: the library's table of old parameter names holds for it."""
        return False

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        seen: Any = None,
    ) -> BaseModelOutput:
        """Hidden states of the last layer, before any norm, [B, T, D].

        Pictures are given as ``pixel_values``, or as what :meth:`see` made of them.
        """
        return self.read(input_ids, attention_mask, pixel_values, image_grid_thw, seen)


_LANGUAGE, _VISION = "model.language_model.layers.*.", "model.visual.blocks.*."

TP_PLAN = {
    "model.language_model.embed_tokens": Vocab(),
    _LANGUAGE + "self_attn.q_proj": Column(heads="num_attention_heads"),
    _LANGUAGE + "self_attn.[kv]_proj": Column(heads="num_key_value_heads"),
    _LANGUAGE + "self_attn.o_proj": Row(),
    _LANGUAGE + "mlp.gate_proj": Column(),
    _LANGUAGE + "mlp.up_proj": Column(),
    _LANGUAGE + "mlp.down_proj": Row(),
    _VISION + "attn.qkv": Column(heads="vision_heads", blocks=(1, 1, 1)),
    _VISION + "attn": Divided("num_heads"),
    _VISION + "attn.proj": Row(),
    _VISION + "mlp.linear_fc1": Column(),
    _VISION + "mlp.linear_fc2": Row(),
    # The last merger, and those whose results go into the first layers.
    "model.visual.*merger*.linear_fc1": Column(),
    "model.visual.*merger*.linear_fc2": Row(),
}

EntryClass = Qwen3VLForConditionalGeneration
