"""Qwen3-VL as an encoder of text and pictures: Transformers' module, dealt over ranks by a table.

Paper: Qwen Team, "Qwen3-VL Technical Report" (2025).
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from sglang.multimodal_gen.runtime.layers.tensor_parallel import Column, Divided, Row
from sglang.multimodal_gen.runtime.models.encoders.qwen2_5_vl import TEXT_PLAN, SeesPictures


class Qwen3VLForConditionalGeneration(  # pyright: ignore[reportIncompatibleMethodOverride]
    SeesPictures, transformers.Qwen3VLForConditionalGeneration
):
    """Says the hidden states of the last layer, before any norm: the denoisers that read it were
    trained on those."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"^model\.language_model\.norm\."]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.language_model.norm = nn.Identity()


_VISION = "model.visual.blocks.*."

TP_PLAN = {
    **TEXT_PLAN,
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
