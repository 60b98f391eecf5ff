"""Small tokenizers of the published classes: their vocabularies cannot be had without a network.

Lengths are what matters to a measurement: encoders pad to lengths of their own, and a chat's
template has as many tokens as with the published vocabulary. All ids lie below the published sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

CLIP_POSITIONS = 77
CHAT_WORDS = [
    "assistant", "system", "Describe", "the", "image", "by", "detailing", "color", "shape", "size",
    "texture", "quantity", "text", "spatial", "relationships", "of", "objects", "and", "background",
    "user", "a", "on",
]  # fmt: skip
"""Each is one token, as in the published vocabulary; other words fall apart into letters. The
longest comes first: a join of a shorter word must not cut it."""
CHAT_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
              "<|image_pad|>", "<|video_pad|>")  # fmt: skip


def write_clip(folder: Path) -> None:
    """Bytes, each a token of its own; the highest id ends a text and pads."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    start, end = "<|startoftext|>", "<|endoftext|>"
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), start, end]
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": CLIP_POSITIONS,
        "bos_token": start,
        "eos_token": end,
        "pad_token": end,
        "unk_token": end,
    }
    vocabulary = {token: index for index, token in enumerate(tokens)}
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def write_t5(folder: Path) -> None:
    """A Unigram model whose pieces are the characters of ASCII."""
    from transformers import T5Tokenizer

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -3.0)]
    pieces += [(chr(code), -8.0 - 0.01 * code) for code in range(33, 127)]
    pieces += [(f"<extra_id_{index}>", 0.0) for index in range(99, -1, -1)]
    T5Tokenizer(vocab=pieces, model_max_length=512).save_pretrained(str(folder))


def write_qwen2(folder: Path) -> None:
    """Bytes, and the words of the chat that Qwen-Image puts around a prompt: 34 tokens of it."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    merges = dict.fromkeys(_merges([*(f"\u0120{word}" for word in CHAT_WORDS), *CHAT_WORDS]))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys([*letters, *(left + right for left, right in merges)])
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=list(merges),  # pyright: ignore[reportArgumentType] (pairs, as it says elsewhere)
        model_max_length=2048,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(CHAT_MARKS[1:])})
    tokenizer.save_pretrained(str(folder))


def _merges(words: Iterable[str]) -> list[tuple[str, str]]:
    """Joins that build each word from its letters, from the left; those behind a space come first,
    so that none cuts another."""
    return [(word[:end], word[end]) for word in words for end in range(1, len(word))]
