"""Small real tokenizers, written in the files that published checkpoints hold; no download.

Both take any text and turn different texts into different ids. Their vocabularies hold some whole
words and every single character of ASCII (T5) or every byte (CLIP), so that a long and a short
split of the same text both occur.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import T5Tokenizer

CLIP_POSITIONS = 77
START, END = "<|startoftext|>", "<|endoftext|>"
WORDS = ("red", "blue", "green", "circle", "square", "above", "small", "large", "the", "cat", "fox")
"""Words that are one token; every other word falls apart into letters."""


def write_clip_tokenizer(folder: Path) -> int:
    """Write vocab.json, merges.txt and the config of a byte-level BPE; returns its vocabulary size.

    As in CLIP's own vocabulary, the end token has the highest id and also pads. Id 2 is an
    ordinary byte: the ``eos_token_id: 2`` of published text configs must not be read literally.
    """
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges(WORDS)
    tokens = [*alphabet, *(f"{char}</w>" for char in alphabet)]
    tokens += [left + right for left, right in merges]
    tokens += [START, END]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": CLIP_POSITIONS,
        "bos_token": START,
        "eos_token": END,
        "pad_token": END,
        "unk_token": END,
    }
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return len(vocabulary)


def write_t5_tokenizer(folder: Path) -> int:
    """Write tokenizer.json of a Unigram model as T5's; returns its vocabulary size."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0)]
    pieces += [(f"▁{word}", -4.0 - 0.1 * rank) for rank, word in enumerate(WORDS)]
    pieces += [(chr(code), -8.0 - 0.01 * code) for code in range(33, 127)]
    pieces += [(f"<extra_id_{index}>", 0.0) for index in range(99, -1, -1)]
    tokenizer = T5Tokenizer(vocab=pieces, model_max_length=512)
    tokenizer.save_pretrained(str(folder))
    return len(tokenizer)


def _merges(words: tuple[str, ...]) -> list[tuple[str, str]]:
    """Joins that build each word from its letters, left to right, the last one closing it."""
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        letters = [*word[:-1], f"{word[-1]}</w>"]
        joined = letters[0]
        for letter in letters[1:]:
            merges[(joined, letter)] = None
            joined += letter
    return list(merges)
