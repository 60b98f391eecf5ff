"""Language models that read the prompt as a chat."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.multimodal_gen.configs.models.base import EncoderConfig
from sglang.multimodal_gen.configs.picture_area import PictureArea


@dataclass
class ChatEncoderConfig(EncoderConfig):
    """A language model, and the chat in which it finds the prompt.

    Prompts are not padded to a length: each has as many embeddings as tokens, at most
    ``max_sequence_length`` of them.

    ``template`` has ``{}`` where the prompt goes; the embeddings of its first ``template_tokens``
    tokens are dropped; where it has a ``template_head``, as many as the checkpoint's tokenizer
    makes of that. ``blank_prompt`` stands for an empty one. For models that see pictures:
    ``picture_slot`` goes before the prompt once for each, ``{}`` in it is its number, and
    ``picture_separator`` between two; ``picture_token`` in the slot becomes as many tokens as
    the picture has; ``picture_area`` is the size at which it is looked at.
    """

    template: str = "{}"
    template_tokens: int = 0
    template_head: str = ""
    blank_prompt: str = ""
    picture_slot: str = ""
    picture_separator: str = ""
    picture_token: str = ""
    picture_area: PictureArea | None = None
