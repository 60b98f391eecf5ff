"""The tokenizer: a T5-format Unigram over the grammar's words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from transformers import T5Tokenizer

from examples.train_demo_model.vocabulary import word_tokenizer
from examples.train_demo_video.clips import corpus
from examples.train_demo_video.models import TEXT_LENGTH


def build_tokenizer() -> T5Tokenizer:
    """Each word of the grammar is one token; letters are the last resort for other words."""
    return word_tokenizer(corpus(), TEXT_LENGTH)


def encode_prompts(tokenizer: T5Tokenizer, prompts: list[str]) -> np.ndarray:
    """Token ids, int16 [B, T], padded with 0."""
    ids = tokenizer(prompts, padding="max_length", max_length=TEXT_LENGTH, truncation=True)
    return np.array(ids["input_ids"], dtype=np.int16)


def load_tokenizer(folder: Path) -> T5Tokenizer:
    """The tokenizer of a model folder."""
    return T5Tokenizer.from_pretrained(folder / "tokenizer")
