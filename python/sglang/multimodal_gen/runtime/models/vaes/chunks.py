"""A clip from the chunks that it was decoded in."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from torch import Tensor

FRAMES = 2


def join_chunks(chunks: Iterable[Tensor], count: int) -> Tensor:
    """``count`` chunks [B, C, T, H, W] one after another; all but the first are equally long.

    Each is written to its place as it comes: no list of all of them lies beside the clip.
    """
    rest = iter(chunks)
    first = next(rest)
    if count == 1:
        return first
    second = next(rest)
    frames = first.shape[FRAMES] + (count - 1) * second.shape[FRAMES]
    whole = first.new_empty(*first.shape[:FRAMES], frames, *first.shape[FRAMES + 1 :])
    end = 0
    for chunk in chain((first, second), rest):
        start, end = end, end + chunk.shape[FRAMES]
        whole[:, :, start:end] = chunk
    return whole
