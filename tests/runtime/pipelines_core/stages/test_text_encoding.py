from __future__ import annotations

import dataclasses

import pytest
import torch

from sglang.multimodal_gen.configs.models import EncoderConfig
from sglang.multimodal_gen.runtime.pipelines_core.stages import TextEncodingStage
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, PipelineDefinitionError

from seed_samples.my_model import MyModelPipelineConfig
from seed_samples.stubs import TEXT_TOKENS, StubTextEncoder, StubTokenizer, stub_request


class CountingEncoder(StubTextEncoder):
    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, input_ids, attention_mask=None):
        self.calls.append((input_ids, attention_mask))
        return super().forward(input_ids, attention_mask)


def encode(encoder=None, *, encoder_config=None, **fields):
    encoder = CountingEncoder() if encoder is None else encoder
    config = MyModelPipelineConfig()
    if encoder_config is not None:
        config = dataclasses.replace(config, text_encoder_configs=(encoder_config,))
    batch = dataclasses.replace(stub_request(), **fields)
    args = ServerArgs.from_flat(device="cpu", pipeline_config=config)
    return encoder, TextEncodingStage(encoder, StubTokenizer()).forward(batch, args)


def test_each_distinct_prompt_is_encoded_once_and_rows_follow_the_prompts():
    encoder, batch = encode(prompt=["a", "b", "a"], seeds=[1, 2, 3])
    assert len(encoder.calls) == 2
    embeds = batch.prompt_embeds[0]
    assert embeds.shape[0] == 3
    assert torch.equal(embeds[0], embeds[2])
    assert not torch.equal(embeds[0], embeds[1])


def test_negative_prompts_are_encoded_only_under_guidance():
    encoder, batch = encode(negative_prompt=["n"])
    assert batch.negative_prompt_embeds == []
    encoder, batch = encode(negative_prompt=["n"], do_classifier_free_guidance=True)
    assert len(encoder.calls) == 2
    assert batch.negative_prompt_embeds[0].shape == batch.prompt_embeds[0].shape


def test_a_cut_prompt_is_named_with_its_limit_and_what_was_lost():
    _, batch = encode(prompt=["x" * (TEXT_TOKENS - 1) + " yyy"])
    (warning,) = batch.warnings
    assert f"takes {TEXT_TOKENS} tokens" in warning
    assert f"has {TEXT_TOKENS + 3}" in warning
    assert "'yyy'" in warning
    _, batch = encode(prompt=["xx xxxxxxyy"])
    assert "'xxxxxxyy'" in batch.warnings[0], "a word that did not fit whole was lost"
    _, batch = encode(prompt=["x" * TEXT_TOKENS])
    assert not batch.warnings


def test_the_mask_goes_to_the_encoder_only_if_its_config_says_so():
    encoder, batch = encode()
    assert encoder.calls[0][1] is not None
    assert batch.prompt_attention_mask[0].sum() == 1
    encoder, batch = encode(encoder_config=EncoderConfig(use_attention_mask=False))
    assert encoder.calls[0][1] is None
    assert batch.prompt_attention_mask == []


def test_the_requests_length_is_the_padded_length():
    encoder, _ = encode(max_sequence_length=9)
    assert encoder.calls[0][0].shape == (1, 9)


def test_encoders_tokenizers_and_configs_must_pair_up():
    with pytest.raises(PipelineDefinitionError, match="2 text encoders but 1 tokenizers"):
        TextEncodingStage(text_encoders=[None, None], tokenizers=[None])
    stage = TextEncodingStage(text_encoders=[None, None], tokenizers=[None, None])
    args = ServerArgs.from_flat(device="cpu", pipeline_config=MyModelPipelineConfig())
    with pytest.raises(PipelineDefinitionError, match="describes 1"):
        stage.forward(stub_request(), args)


def test_padding_is_zeros_and_prompts_are_cleaned_where_the_family_says_so():
    encoder, plain = encode(prompt=["a &amp; b"])
    cleaning = EncoderConfig(max_length=TEXT_TOKENS, prompt_cleaning=True, zero_padding=True)
    _, batch = encode(encoder, prompt=[" a  &amp;amp;\nb "], encoder_config=cleaning)
    _, wanted = encode(encoder, prompt=["a & b"])
    (mask,) = batch.prompt_attention_mask
    kept = int(mask.sum())
    assert 0 < kept < TEXT_TOKENS
    embeds, expected = batch.prompt_embeds[0], wanted.prompt_embeds[0]
    assert torch.equal(embeds[:, :kept], expected[:, :kept])
    assert not embeds[:, kept:].any()
    assert expected[:, kept:].any(), "the encoder's padding is zeros by itself"
    assert not torch.equal(plain.prompt_embeds[0], expected)


def test_a_tokenizer_that_cannot_pad_is_refused_when_the_stage_is_built():
    tokenizer = StubTokenizer()
    tokenizer.pad_token, tokenizer.name_or_path = None, "my-model/tokenizer"
    with pytest.raises(
        CheckpointError, match=r"StubTokenizer \(my-model/tokenizer\) has no padding"
    ):
        TextEncodingStage(StubTextEncoder(), tokenizer)
    tokenizer.pad_token = "x"
    TextEncodingStage(StubTextEncoder(), tokenizer)
