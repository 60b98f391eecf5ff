"""Prompts to embeddings, through a language model that reads them as a chat, with pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sglang.multimodal_gen.configs.models.base import EncoderConfig
from sglang.multimodal_gen.configs.models.chat_encoder import ChatEncoderConfig
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stages.text_encoding import (
    TextEmbeddings,
    TextEncodingStage,
)


class ChatTextEncodingStage(TextEncodingStage):
    """Goes by `ChatEncoderConfig`: a template, whose own tokens are dropped, and no padding.

    Prompts of a batch that differ in length are joined with zeros behind, and a mask says which
    embeddings are tokens. Where all are, there is no mask, and nothing is paid for one.

    Args:
        text_encoder: the language model.
        tokenizer: its tokenizer.
        picture_processor: makes the model's input of pictures (``pixel_values`` and
            ``image_grid_thw``), for models that see the input images.
    """

    reads = frozenset({"condition_image"}).union(TextEncodingStage.reads or ())
    writes = TextEncodingStage.writes

    def __init__(self, text_encoder: Any, tokenizer: Any, picture_processor: Any = None) -> None:
        super().__init__(text_encoder, tokenizer)
        self.picture_processor = picture_processor

    def encode(
        self, batch: Req, prompts: Sequence[str], configs: Sequence[EncoderConfig], *, label: str
    ) -> TextEmbeddings:
        """Embeddings of ``prompts``; masks only where a prompt is shorter than another."""
        result = super().encode(batch, prompts, configs, label=label)
        if all(bool(mask.all()) for mask in result.masks):
            result.masks.clear()
        return result

    def encode_one(
        self, batch: Req, prompt: str, encoder: Any, tokenizer: Any, config: EncoderConfig
    ) -> tuple[Tensor, Tensor]:
        """One prompt: its embeddings [1, T, D] and their mask, which is true."""
        assert isinstance(config, ChatEncoderConfig)
        most = batch.max_sequence_length
        inputs, slots = {}, ""
        if self.picture_processor is not None and batch.condition_image:
            inputs, slots = self._pictures(batch.condition_image, config)
        text = config.template.format(slots + prompt)
        # What follows does not reach back: the rest of a text that is cut need not be encoded.
        cut = None if most is None or slots else config.template_tokens + most
        tokens = tokenizer(text, max_length=cut, truncation=cut is not None, return_tensors="pt")
        device = next(encoder.parameters()).device
        inputs = {
            name: value.to(device) for name, value in {**inputs, **tokens}.items() if name in _TAKEN
        }
        output = getattr(encoder(**inputs), config.output)
        embeds = output[:, config.template_tokens :][:, :most]
        return embeds, torch.ones(embeds.shape[:2], dtype=torch.bool, device=device)

    def joined(self, encoded: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """All prompts, zeros behind those that are shorter."""
        values = pad_sequence([value[0] for value, _ in encoded], batch_first=True)
        masks = pad_sequence([mask[0] for _, mask in encoded], batch_first=True)
        return values, masks

    def _pictures(
        self, images: Sequence[Image.Image], config: ChatEncoderConfig
    ) -> tuple[dict[str, Tensor], str]:
        """What the model sees, and the slots for it in the text."""
        assert config.picture_area is not None
        resized = [
            image.resize(config.picture_area.size_for(*image.size), Image.Resampling.LANCZOS)
            for image in images
        ]
        seen = dict(self.picture_processor(images=resized, return_tensors="pt"))
        merged = self.picture_processor.merge_size**2
        counts = (seen["image_grid_thw"].prod(dim=-1) // merged).tolist()
        slots = (
            config.picture_slot.format(number).replace(
                config.picture_token, config.picture_token * count
            )
            for number, count in enumerate(counts, start=1)
        )
        return seen, "".join(slots)


_TAKEN = ("input_ids", "pixel_values", "image_grid_thw")
"""What is given to the model. One prompt without padding needs no mask."""
