"""Tokenizers: a CLIP-format BPE and a T5-format Unigram over the prompt grammar's words.

Every printable ASCII character is a token too, so any text tokenises (into letters, which the model
has not learned to read). The rest is an unknown token for T5 and bytes for CLIP.
"""

from __future__ import annotations

import itertools
import string
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers
from transformers import CLIPTokenizer, T5Tokenizer

from examples.train_demo_model.phrases import corpus
from examples.train_demo_model.scenes import KINDS

CLIP_START, CLIP_END = "<|startoftext|>", "<|endoftext|>"
CLIP_LENGTH = 77
T5_LENGTH = 40
"""Longest prompt in T5 tokens, its end token included (``max_sequence_length``)."""


def build_clip_tokenizer() -> CLIPTokenizer:
    """Lower-casing byte-level BPE whose merges make each word of the grammar one token."""
    merges = _merges({word.lower() for word in corpus() if word.isalpha()})
    # CLIP's order: 256 bytes, 256 bytes that end a word, one token per merge, start, end. The end
    # token has the highest id, so both pooling rules of CLIPTextModel (highest id; first
    # `eos_token_id`) pick the same place.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(letter + "</w>" for letter in letters), *map("".join, merges)]
    tokens += [CLIP_START, CLIP_END]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    pairs: list[Any] = merges  # typed as texts, taken as pairs
    return CLIPTokenizer(vocab=vocabulary, merges=pairs, model_max_length=CLIP_LENGTH)


def build_t5_tokenizer() -> T5Tokenizer:
    """The grammar's words, in the format of T5."""
    return word_tokenizer(corpus(), T5_LENGTH)


def word_tokenizer(words: list[str], length: int) -> T5Tokenizer:
    """Unigram whose pieces are words, with characters as the last resort."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [("▁" + word, -4.0) for word in words if len(word) > 1]
    # A comma or full stop follows its word without a space.
    pieces += [("▁", -9.0), ("▁a", -4.0), ("▁A", -4.0), (",", -4.0), (".", -4.0)]
    known = {piece for piece, _ in pieces}
    characters = string.ascii_letters + string.digits + string.punctuation
    pieces += [(c, -12.0) for c in characters if c not in known]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=length)


def encode_clip(tokenizer: CLIPTokenizer, prompts: list[str]) -> np.ndarray:
    """Token ids as FLUX feeds them to CLIP, int16 [B, 77]: padded with the end token."""
    ids = tokenizer(prompts, padding="max_length", max_length=CLIP_LENGTH, truncation=True)
    return np.array(ids["input_ids"], dtype=np.int16)


def encode_t5(tokenizer: T5Tokenizer, prompts: list[str]) -> np.ndarray:
    """Token ids as FLUX feeds them to T5, int16 [B, 40]: padded, and no mask is used."""
    ids = tokenizer(prompts, padding="max_length", max_length=T5_LENGTH, truncation=True)
    return np.array(ids["input_ids"], dtype=np.int16)


def find_nouns(t5_ids_NT: np.ndarray, tokenizer: T5Tokenizer) -> np.ndarray:
    """Where each shape's noun stands, int8 [N, 3], in the order of the scene; 0 for no shape.

    A noun before "is" names a shape again ("... and the blue square is left of ...").
    """
    vocabulary = tokenizer.get_vocab()
    nouns = np.isin(t5_ids_NT, [vocabulary["▁" + kind] for kind in KINDS])
    nouns[:, :-1] &= t5_ids_NT[:, 1:] != vocabulary["▁is"]
    order = np.cumsum(nouns, axis=1)
    found = [(nouns & (order == i + 1)).argmax(axis=1) for i in range(3)]
    return np.stack(found, axis=1).astype(np.int8)


def load_tokenizers(folder: Path) -> tuple[CLIPTokenizer, T5Tokenizer]:
    """The tokenizers of a model folder."""
    return (
        CLIPTokenizer.from_pretrained(folder / "tokenizer"),
        T5Tokenizer.from_pretrained(folder / "tokenizer_2"),
    )


def _merges(words: set[str]) -> list[tuple[str, str]]:
    """Byte-pair merges, the commonest pair first, until each word is one token.

    By hand, since the library's trainer breaks ties at random: another run, another vocabulary.
    """
    split = [[*word[:-1], word[-1] + "</w>"] for word in sorted(words)]
    merges: list[tuple[str, str]] = []
    while pairs := Counter(pair for word in split for pair in itertools.pairwise(word)):
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for word in split:
            for i in range(len(word) - 2, -1, -1):
                if tuple(word[i : i + 2]) == best:
                    word[i : i + 2] = ["".join(best)]
    return merges
