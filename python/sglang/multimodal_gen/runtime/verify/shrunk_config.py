"""Configs of a checkpoint made small, without knowing whose they are.

Depth is cut: every count of layers becomes 2 at most, and lists with one entry a layer follow. Then
every width and every count of heads, in all components, is divided by one and the same number: what
was equal stays equal, and sums and ratios hold, so that a text encoder's width still is what the
denoiser expects. Head widths, channels of latents and pictures, and vocabularies stay.

An odd count of heads becomes the next even one where nothing else depends on it, so that heads can
be dealt over two ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

DEPTH = 2
DIVISORS = (8, 4, 2, 1)
SMALLEST_WIDTH = 16
SMALLEST_HEADS = 2

_LAYERS = re.compile(r"(.*_)?(layers|layers_per_block)")
_HEADS = re.compile(r"(.*_)?heads")
_WIDTH = re.compile(r"(.*_)?(dim|d_model|d_ff|hidden_size|intermediate_size|embedding_size)")
_FIXED = re.compile(r".*(head_dim|z_dim|freq_dim|rope.*dim)|d_kv")
_HEAD_WIDTH = re.compile(r"(.*_)?head_dim|d_kv")
_CHANNELS = "block_out_channels"
_GROUPS = "norm_num_groups"


def common_divisor(configs: Mapping[str, Mapping[str, Any]]) -> int:
    """The largest number by which all widths and heads of all configs can be divided."""
    numbers = [item for config in configs.values() for item in _sizes(config)]
    for divisor in DIVISORS:
        if all(_divides(key, value, divisor) for key, value in numbers):
            return divisor
    return 1


def head_counts(config: Mapping[str, Any]) -> list[int]:
    """All counts of heads in a config, nested ones too."""
    return [value for key, value in _sizes(config) if _HEADS.fullmatch(key)]


def shrunk(config: Mapping[str, Any], divisor: int) -> dict[str, Any]:
    """A config with fewer layers, and widths and heads divided; nested configs too."""
    small: dict[str, Any] = {}
    cut = {value: min(value, DEPTH) for key, value in config.items() if _counts_layers(key, value)}
    for key, value in config.items():
        if _counts_layers(key, value):
            small[key] = cut[value]
        elif isinstance(value, Mapping):
            small[key] = shrunk(value, divisor)
        elif _is_size(key, value):
            small[key] = value // divisor
        elif key == _CHANNELS:
            small[key] = _channels(value, config.get(_GROUPS), divisor)
        elif isinstance(value, list) and key.startswith("layer") and len(value) in cut:
            small[key] = value[: cut[len(value)]]
        else:
            small[key] = value
    return {key: _even(key, value, small) for key, value in small.items()}


def _even(key: str, value: Any, config: Mapping[str, Any]) -> Any:
    """An odd count of heads, and one more if no other number of the config speaks against it.

    Either the heads' width is given, and their product is no width that is given too; or it is
    what a width leaves each, and then the new count must divide all widths.
    """
    if type(value) is not int or not _HEADS.fullmatch(key) or value < 2 or value % 2 == 0:
        return value
    if any(_HEADS.fullmatch(other) for other in config if other != key):
        return value  # of keys and values apart, or of another part: one follows from the other
    sizes = [size for name, size in config.items() if name != key and _is_size(name, size)]
    width = next((w for name, w in config.items() if _HEAD_WIDTH.fullmatch(name)), None)
    if type(width) is int:
        return value if value * width in sizes else value + 1
    return value + 1 if all(size % (value + 1) == 0 for size in sizes) else value


def _counts_layers(key: str, value: object) -> bool:
    return type(value) is int and value > DEPTH and _LAYERS.fullmatch(key) is not None


def _is_size(key: str, value: object) -> bool:
    if type(value) is not int or value <= 1 or _FIXED.fullmatch(key):
        return False
    return bool(_HEADS.fullmatch(key) or _WIDTH.fullmatch(key))


def _sizes(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _sizes(value)
        elif _is_size(key, value):
            yield key, value


def _divides(key: str, value: int, divisor: int) -> bool:
    smallest = SMALLEST_HEADS if _HEADS.fullmatch(key) else SMALLEST_WIDTH
    return divisor == 1 or (value % divisor == 0 and value // divisor >= smallest)


def _channels(value: Any, groups: Any, divisor: int) -> Any:
    """The levels of an autoencoder, as far as its group norms can divide them."""
    groups = groups if isinstance(groups, int) else 1
    while divisor > 1 and any(channels % (divisor * groups) for channels in value):
        divisor //= 2
    return [channels // divisor for channels in value]
