"""Prompts to embeddings, through a language model that reads them as a chat, with pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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
from sglang.multimodal_gen.runtime.utils.image_file import over_white

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.server_args import ServerArgs


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
    writes = frozenset({"picture_spans"}).union(TextEncodingStage.writes or ())

    def __init__(self, text_encoder: Any, tokenizer: Any, picture_processor: Any = None) -> None:
        super().__init__(text_encoder, tokenizer)
        self.picture_processor = picture_processor
        self._views: dict[int, _View] = {}

    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        """Also writes where the input images' tokens stand, alike in all prompts' embeddings.

        The model looks at the images once, for all prompts and negative prompts of the batch.
        """
        try:
            return super().forward(batch, server_args)
        finally:
            self._views.clear()

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
        device = next(encoder.parameters()).device
        view = None
        if self.picture_processor is not None and batch.condition_image:
            view = self._view(batch.condition_image, encoder, config, device)
        slots = "" if view is None else view.slots
        text = config.template.format(slots + (prompt or config.blank_prompt))
        dropped = config.template_tokens
        if config.template_head:
            dropped = len(tokenizer(config.template_head).input_ids)
        # What follows does not reach back: the rest of a text that is cut need not be encoded.
        cut = None if most is None or slots else dropped + most
        tokens = tokenizer(text, max_length=cut, truncation=cut is not None, return_tensors="pt")
        ids = tokens.input_ids
        seen = {}
        if view is not None:
            seen = {"seen": view.seen, "image_grid_thw": view.grids}
            token = tokenizer.convert_tokens_to_ids(config.picture_token)
            batch.picture_spans = _spans(ids[0] == token, view.counts, dropped)
        output = getattr(encoder(input_ids=ids.to(device), **seen), config.output)
        embeds = output[:, dropped:][:, :most]
        return embeds, torch.ones(embeds.shape[:2], dtype=torch.bool, device=device)

    def joined(self, encoded: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """All prompts, zeros behind those that are shorter."""
        values = pad_sequence([value[0] for value, _ in encoded], batch_first=True)
        masks = pad_sequence([mask[0] for _, mask in encoded], batch_first=True)
        return values, masks

    def _view(
        self,
        images: Sequence[Image.Image],
        encoder: Any,
        config: ChatEncoderConfig,
        device: torch.device,
    ) -> _View:
        """What this encoder sees of the batch's images; it looks the first time it is asked."""
        view = self._views.get(id(encoder))
        if view is None:
            view = self._views[id(encoder)] = self._looked(images, encoder, config, device)
        return view

    def _looked(
        self,
        images: Sequence[Image.Image],
        encoder: Any,
        config: ChatEncoderConfig,
        device: torch.device,
    ) -> _View:
        assert config.picture_area is not None
        resized = [
            over_white(
                image.resize(config.picture_area.size_for(*image.size), Image.Resampling.LANCZOS)
            )
            for image in images
        ]
        given = self.picture_processor(images=resized, return_tensors="pt")
        merged = self.picture_processor.merge_size**2
        grids = given["image_grid_thw"]
        counts = (grids.prod(dim=-1) // merged).tolist()
        slots = (
            config.picture_slot.format(number).replace(
                config.picture_token, config.picture_token * count
            )
            for number, count in enumerate(counts, start=1)
        )
        grids = grids.to(device)
        seen = encoder.see(given["pixel_values"].to(device), grids)
        return _View(seen, grids, counts, config.picture_separator.join(slots))


class _View(NamedTuple):
    """What an encoder sees of the images, how many tokens each has, and their slots in a text."""

    seen: Any
    grids: Tensor
    counts: list[int]
    slots: str


def _spans(pictures_T: Tensor, counts: Sequence[int], dropped: int) -> list[tuple[int, int]]:
    """First token and count of each image, behind the ``dropped`` tokens of the template."""
    places = pictures_T.nonzero().flatten().tolist()
    firsts = [sum(counts[:index]) for index in range(len(counts))]
    return [(places[first] - dropped, count) for first, count in zip(firsts, counts, strict=True)]
