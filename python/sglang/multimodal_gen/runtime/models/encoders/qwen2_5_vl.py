"""Qwen2.5-VL as an encoder of text and pictures: Transformers' module, dealt over ranks by a table.

Paper: Bai et al., "Qwen2.5-VL Technical Report" (2025).
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from sglang.multimodal_gen.runtime.layers.tensor_parallel import Column, Divided, Row, Vocab
from sglang.multimodal_gen.runtime.memory.layerwise import LayerwiseOffloadableModuleMixin

_LANGUAGE, _VISION = "model.language_model.layers.*.", "model.visual.blocks.*."

TEXT_PLAN = {
    "model.language_model.embed_tokens": Vocab(),
    _LANGUAGE + "self_attn.q_proj": Column(heads="num_attention_heads"),
    _LANGUAGE + "self_attn.[kv]_proj": Column(heads="num_key_value_heads"),
    _LANGUAGE + "self_attn.o_proj": Row(),
    _LANGUAGE + "mlp.gate_proj": Column(),
    _LANGUAGE + "mlp.up_proj": Column(),
    _LANGUAGE + "mlp.down_proj": Row(),
}


class SeesPictures(LayerwiseOffloadableModuleMixin):
    """What Qwen's models of text and pictures have in common, put before the library's class: the
    vision tower and the language model, without the head that predicts words."""

    layer_names = ["model.language_model.layers", "model.visual.blocks"]
    layerwise_offload_dit_group_enabled = False
    _tied_weights_keys = None
    config: Any
    model: Any
    lm_head: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # pyright: ignore[reportCallIssue]  # the library's, which follows
        del self.lm_head
        # Where the tables of the files look for them.
        self.num_attention_heads: int = config.text_config.num_attention_heads
        self.num_key_value_heads: int = config.text_config.num_key_value_heads
        self.vision_heads: int = config.vision_config.num_heads

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: the library's table of old parameter names holds for it."""
        return False

    def see(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Any:
        """What the vision tower makes of pictures, for any number of texts about them."""
        return self.model.get_image_features(pixel_values, image_grid_thw, return_dict=True)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        seen: Any = None,
    ) -> BaseModelOutput:
        """What the language model says of texts and pictures, [B, T, D].

        Pictures are given as ``pixel_values``, or as what :meth:`see` made of them. Their tokens
        stand at 3-D positions (M-RoPE), as in training; the library makes them only where it is
        told which tokens those are, and without a word counts up otherwise.
        """
        pictures = (input_ids == self.config.image_token_id).to(torch.int32)
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            pixel_values=pixel_values,
            image_grid_thw=image_grid_thw,
            mm_token_type_ids=pictures,
            mm_encoder_outputs=None if seen is None else {"image": seen},
            use_cache=False,
        )
        return BaseModelOutput(last_hidden_state=output.last_hidden_state)


class Qwen2_5_VLForConditionalGeneration(  # pyright: ignore[reportIncompatibleMethodOverride]
    SeesPictures, transformers.Qwen2_5_VLForConditionalGeneration
):
    """Says the hidden states after the last norm."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]


class Qwen2_5_VLTextEncoder(Qwen2_5_VLForConditionalGeneration):
    """The same without the vision tower, for pipelines that show it no picture: 0.68 of 7.75 B
    parameters, 1.35 GB in bf16, that would be loaded and never run."""

    TP_PLAN = TEXT_PLAN
    layer_names = ["model.language_model.layers"]
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"^model\.visual\."]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.model.visual


TP_PLAN = {
    **TEXT_PLAN,
    _VISION + "attn.qkv": Column(heads="vision_heads", blocks=(1, 1, 1)),
    _VISION + "attn": Divided("num_heads"),
    _VISION + "attn.proj": Row(),
    _VISION + "mlp.gate_proj": Column(),
    _VISION + "mlp.up_proj": Column(),
    _VISION + "mlp.down_proj": Row(),
    "model.visual.merger.mlp.0": Column(),
    "model.visual.merger.mlp.2": Row(),
}

# By this name the library finds its table of old parameter names.
Qwen2_5_VLTextEncoder.__name__ = Qwen2_5_VLForConditionalGeneration.__name__

EntryClass = Qwen2_5_VLForConditionalGeneration
