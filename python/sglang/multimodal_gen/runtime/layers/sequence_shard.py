"""Which tokens each rank holds when a sequence is split: the arithmetic, without any rank asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError


class Run(NamedTuple):
    """Neighbouring tokens: the first, and how many."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """The streams of one forward pass, and how each is split into equal pieces.

    A stream is a sequence of tokens, such as a model's text or its image. Each is split by itself,
    so that every rank has its share of both: piece ``r`` holds tokens ``r * local`` and on, and
    what lies past the end of the stream is padding. A model that joins streams joins the pieces,
    so a rank's joint sequence is ``[text piece | image piece]``.

    Args:
        parts: pieces, one a rank.
        lengths: tokens of each stream known so far, without padding.
    """

    parts: int
    lengths: tuple[tuple[str, int], ...] = ()

    def knows(self, stream: str) -> bool:
        """Whether the stream's length is known yet."""
        return any(name == stream for name, _ in self.lengths)

    def with_stream(self, stream: str, length: int) -> SequenceShard:
        """The same, and one more stream.

        Raises:
            PipelineDefinitionError: it has another length already.
        """
        if not self.knows(stream):
            return SequenceShard(self.parts, (*self.lengths, (stream, length)))
        if self.length(stream) != length:
            raise PipelineDefinitionError(
                f"stream {stream!r} has {self.length(stream)} tokens in one place of the SP_PLAN "
                f"and {length} in another"
            )
        return self

    def length(self, stream: str) -> int:
        """Tokens of the whole stream, without padding.

        Raises:
            PipelineDefinitionError: no split has told it yet.
        """
        for name, length in self.lengths:
            if name == stream:
                return length
        raise PipelineDefinitionError(
            f"stream {stream!r} is used before an edge of the SP_PLAN splits it; split so far: "
            f"{', '.join(name for name, _ in self.lengths) or 'none'}"
        )

    def local(self, *streams: str) -> int:
        """Tokens, padding and all, of those streams on each rank."""
        return sum(-(-self.length(stream) // self.parts) for stream in streams)

    def piece(self, stream: str, part: int) -> Run:
        """The tokens of the whole stream that one piece holds; fewer than `local` at its end."""
        local, length = self.local(stream), self.length(stream)
        start = min(part * local, length)
        return Run(start, min(local, length - start))

    def kept(self, streams: Sequence[str], parts: range) -> tuple[Run, ...]:
        """Where tokens, and not padding, stand in the joint sequences of ``parts``, end to end."""
        return _kept(self, tuple(streams), parts)


@lru_cache(maxsize=1024)
def _kept(shard: SequenceShard, streams: tuple[str, ...], parts: range) -> tuple[Run, ...]:
    runs: list[Run] = []
    offset = 0
    for part in parts:
        for stream in streams:
            held = shard.piece(stream, part).length
            if runs and held and sum(runs[-1]) == offset:
                runs[-1] = Run(runs[-1].start, runs[-1].length + held)
            elif held:
                runs.append(Run(offset, held))
            offset += shard.local(stream)
    return tuple(runs)


def take(x: Tensor, runs: Sequence[Run], dim: int) -> Tensor:
    """``x`` along ``dim`` without what lies between ``runs``; copies only if there are several."""
    if len(runs) == 1:
        return x.narrow(dim, *runs[0])
    if not runs:
        return x.narrow(dim, 0, 0)
    return torch.cat([x.narrow(dim, *run) for run in runs], dim)


def split_streams(
    x: Tensor, shard: SequenceShard, streams: Sequence[str], part: int, dim: int
) -> Tensor:
    """One piece of ``x``, whose ``dim`` holds whole streams end to end; padding is zero."""
    pieces: list[Tensor] = []
    offset = 0
    for stream in streams:
        run = shard.piece(stream, part)
        pieces.append(x.narrow(dim, offset + run.start, run.length))
        missing = shard.local(stream) - run.length
        if missing:
            shape = list(x.shape)
            shape[dim] = missing
            pieces.append(x.new_zeros(shape))
        offset += shard.length(stream)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def join_streams(x: Tensor, shard: SequenceShard, streams: Sequence[str], dim: int) -> Tensor:
    """Whole streams end to end, from all pieces of them end to end: the inverse of a split."""
    dim = dim % x.ndim
    pieces = x.unflatten(dim, (shard.parts, shard.local(*streams)))
    whole: list[Tensor] = []
    offset = 0
    for stream in streams:
        local = shard.local(stream)
        tokens = pieces.narrow(dim + 1, offset, local).flatten(dim, dim + 1)
        whole.append(tokens.narrow(dim, 0, shard.length(stream)))
        offset += local
    return whole[0] if len(whole) == 1 else torch.cat(whole, dim)
