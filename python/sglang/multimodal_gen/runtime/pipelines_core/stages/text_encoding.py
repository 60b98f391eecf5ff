"""Prompts to embeddings, through any number of Transformers text encoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sglang.multimodal_gen.configs.models.base import EncoderConfig
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.pipelines_core.stages.finite import require_finite
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, PipelineDefinitionError
from sglang.multimodal_gen.runtime.utils.prompt_cleaning import clean_prompt

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.server_args import ServerArgs


class TextEmbeddings(NamedTuple):
    """What the encoders made of B prompts; lists with one entry an encoder that gives that kind."""

    embeds: list[Tensor]
    pooled: list[Tensor]
    masks: list[Tensor]


class TextEncodingStage(PipelineStage):
    """Encodes the prompts, and the negative prompts under classifier-free guidance.

    Takes one encoder and tokenizer, or lists of them; the i-th goes by the i-th entry of the
    pipeline config's ``text_encoder_configs``. Each distinct prompt is encoded once, by itself: an
    embedding does not depend on the batch.
    """

    uses = ("text_encoders",)
    reads = frozenset(
        {"prompt", "negative_prompt", "do_classifier_free_guidance", "max_sequence_length"}
    )
    writes = frozenset(
        {
            "prompt_embeds",
            "pooled_embeds",
            "prompt_attention_mask",
            "negative_prompt_embeds",
            "neg_pooled_embeds",
            "negative_attention_mask",
        }
    )

    def __init__(
        self,
        text_encoder: Any = None,
        tokenizer: Any = None,
        *,
        text_encoders: Sequence[Any] | None = None,
        tokenizers: Sequence[Any] | None = None,
    ) -> None:
        self.text_encoders = [text_encoder] if text_encoders is None else list(text_encoders)
        self.tokenizers = [tokenizer] if tokenizers is None else list(tokenizers)
        if len(self.text_encoders) != len(self.tokenizers):
            raise PipelineDefinitionError(
                f"{type(self).__name__}: {len(self.text_encoders)} text encoders but "
                f"{len(self.tokenizers)} tokenizers"
            )
        for tokenizer in self.tokenizers:
            if getattr(tokenizer, "pad_token", "none of its own") is None:
                where = getattr(tokenizer, "name_or_path", "")
                raise CheckpointError(
                    f"the tokenizer {type(tokenizer).__name__} ({where}) has no padding token, and "
                    "prompts are padded. Likely cause: its tokenizer_config.json is missing"
                )

    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        """Writes the embeddings of the prompts and, if guidance needs them, of the negatives."""
        configs = self._configs(server_args)
        positive = self.encode(batch, batch.prompt, configs, label="prompt")
        batch.prompt_embeds = positive.embeds
        batch.pooled_embeds = positive.pooled
        batch.prompt_attention_mask = positive.masks
        if batch.do_classifier_free_guidance:
            assert batch.negative_prompt is not None, "admission turns guidance on only with one"
            negative = self.encode(batch, batch.negative_prompt, configs, label="negative prompt")
            batch.negative_prompt_embeds = negative.embeds
            batch.neg_pooled_embeds = negative.pooled
            batch.negative_attention_mask = negative.masks
        return batch

    def encode(
        self, batch: Req, prompts: Sequence[str], configs: Sequence[EncoderConfig], *, label: str
    ) -> TextEmbeddings:
        """Embeddings of ``prompts``, through every encoder; ``label`` names them in warnings."""
        result = TextEmbeddings([], [], [])
        distinct = list(dict.fromkeys(prompts))
        rows = torch.tensor([distinct.index(prompt) for prompt in prompts])
        for encoder, tokenizer, config in zip(
            self.text_encoders, self.tokenizers, configs, strict=True
        ):
            texts = [clean_prompt(p) if config.prompt_cleaning else p for p in distinct]
            for prompt, text in zip(distinct, texts, strict=True):
                about = [image for image, given in enumerate(prompts) if given == prompt]
                _warn_if_cut(batch, text, about, tokenizer, config, label)
            encoded = [self.encode_one(batch, t, encoder, tokenizer, config) for t in texts]
            values, masks = self.joined(encoded)
            require_finite(values, f"{type(encoder).__name__}'s embedding of the {label}")
            pooled = config.output == "pooler_output"
            (result.pooled if pooled else result.embeds).append(values[rows.to(values.device)])
            if config.use_attention_mask:
                result.masks.append(masks[rows.to(masks.device)])
        return result

    def encode_one(
        self, batch: Req, prompt: str, encoder: Any, tokenizer: Any, config: EncoderConfig
    ) -> tuple[Tensor, Tensor]:
        """One prompt through one encoder: its output [1, ...] and the tokens' mask [1, T]."""
        length = _padded_length(batch, tokenizer, config)
        tokens = tokenizer(
            prompt, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        )
        device = next(encoder.parameters()).device
        inputs = {"input_ids": tokens.input_ids.to(device)}
        if config.use_attention_mask:
            inputs["attention_mask"] = tokens.attention_mask.to(device)
        output = getattr(encoder(**inputs), config.output)
        mask = tokens.attention_mask.to(device)
        if config.zero_padding:
            output = output.masked_fill(mask[..., None] == 0, 0)
        return output, mask

    def joined(self, encoded: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Outputs and masks of all prompts, from those of each."""
        values, masks = zip(*encoded, strict=True)
        return torch.cat(values), torch.cat(masks)

    def _configs(self, server_args: ServerArgs) -> tuple[EncoderConfig, ...]:
        configs = self.pipeline_config(server_args).text_encoder_configs
        if len(configs) != len(self.text_encoders):
            raise PipelineDefinitionError(
                f"{type(self).__name__} has {len(self.text_encoders)} encoders, but the pipeline "
                f"config's text_encoder_configs describes {len(configs)}"
            )
        return configs


def _padded_length(batch: Req, tokenizer: Any, config: EncoderConfig) -> int:
    if config.max_length is not None:
        return config.max_length
    if batch.max_sequence_length is not None:
        return batch.max_sequence_length
    return tokenizer.model_max_length


def _warn_if_cut(
    batch: Req,
    prompt: str,
    images: Sequence[int],
    tokenizer: Any,
    config: EncoderConfig,
    label: str,
) -> None:
    """A cut prompt is never silent: the warning names the encoder's limit and the lost words."""
    length = _padded_length(batch, tokenizer, config)
    count = len(tokenizer(prompt, truncation=False, verbose=False).input_ids)
    if count <= length:
        return
    lost = _lost_words(prompt, tokenizer, length)
    shown = lost if len(lost) <= 80 else lost[:77] + "..."
    warning = (
        f"{label} cut: {type(tokenizer).__name__} takes {length} tokens and the {label} has "
        f"{count}; this encoder did not see {shown!r}"
    )
    batch.warn(warning, images)


def _lost_words(prompt: str, tokenizer: Any, length: int) -> str:
    """The end of the prompt from the first word that did not fit whole."""
    plain = tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    kept = length - tokenizer.num_special_tokens_to_add()
    start = plain.offset_mapping[kept][0]
    begun = prompt[:start].rstrip()
    if start < len(prompt) and not prompt[start].isspace() and begun == prompt[:start]:
        start = max((i + 1 for i, c in enumerate(begun) if c.isspace()), default=0)
    return prompt[start:].strip()
