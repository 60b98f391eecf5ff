"""Copies of strided tensors in words of eight bytes.

torch copies what is not contiguous element by element, at a fraction of the memory's speed where
elements have two bytes. Heads are runs of 64 or 128 neighbours, which can be moved as wider words.
"""

from __future__ import annotations

from torch import Tensor, int64

WORD = 8


def copy_wide(target: Tensor, source: Tensor) -> None:
    """``target.copy_(source)``: same shape and dtype, the same bits."""
    if source.is_cuda and _has_words(source) and _has_words(target):
        target.view(int64).copy_(source.view(int64))
    else:
        target.copy_(source)


def _has_words(x: Tensor) -> bool:
    """Whether the last dimension is made of whole, aligned words."""
    per_word = WORD // x.element_size()
    counts = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and all(count % per_word == 0 for count in counts)
