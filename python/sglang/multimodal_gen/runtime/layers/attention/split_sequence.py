"""Attention over a sequence of which each rank holds a piece: Ulysses, ring, and both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.layers.attention.backends.backend import AttentionBackend
from sglang.multimodal_gen.runtime.layers.attention.ring import Piece, ring_attention
from sglang.multimodal_gen.runtime.layers.qk_norm import (
    HeadRoom,
    HeadStream,
    norm_rotate_into,
    norm_rotate_join,
)
from sglang.multimodal_gen.runtime.layers.rotary_embedding import Rotary
from sglang.multimodal_gen.runtime.layers.sequence_shard import SequenceShard, take
from sglang.multimodal_gen.runtime.layers.wide_copy import copy_wide
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, PipelineDefinitionError


@dataclass(eq=False)
class SequenceContext:
    """What the edges of a denoiser tell its attention layers while a forward pass runs.

    Attributes:
        sp, ulysses, ring: the groups; rank r of ``sp`` holds piece r, ``ulysses`` neighbours it.
        shard: the streams of the forward pass in progress.
    """

    sp: Group
    ulysses: Group
    ring: Group
    shard: SequenceShard = field(init=False)
    _mask: tuple[Tensor, Tensor] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.begin()

    @classmethod
    def of(cls, parallel: ParallelState) -> SequenceContext:
        """The context of a denoiser on this rank."""
        return cls(sp=parallel.sp, ulysses=parallel.ulysses, ring=parallel.ring)

    def begin(self) -> None:
        """A forward pass starts: no length is known."""
        self.shard = SequenceShard(self.sp.size)
        self._mask = None

    def whole_mask(self, mask: Tensor) -> Tensor:
        """Every rank's key mask, [B, 1, 1, parts * T]; sent once if all layers use the same."""
        if self._mask is None or self._mask[0] is not mask:
            # As bytes: not every backend sends booleans.
            whole = self.sp.all_gather(mask.view(torch.uint8), dim=-1).view(torch.bool)
            self._mask = (mask, whole)
        return self._mask[1]

    @property
    def parts_of_ring(self) -> list[range]:
        """The pieces that each rank of the ring has after the exchange within ``ulysses``."""
        width = self.ulysses.size
        return [range(rank * width, (rank + 1) * width) for rank in range(self.ring.size)]


@dataclass(frozen=True, eq=False)
class SplitAttention:
    """One attention layer's part: its name, and the streams that its keys are.

    Ulysses (Jacobs et al. 2023): an all-to-all gives each rank all tokens of some heads, and one
    back. Ring (Liu et al. 2023): keys and values pass round. Both: Fang and Zhao 2024.
    """

    name: str
    streams: tuple[str, ...]
    context: SequenceContext

    def attend(
        self,
        q_BSHD: Tensor,
        k_BTHD: Tensor,
        v_BTHD: Tensor,
        mask: Tensor | None,
        causal: bool,
        backend: AttentionBackend,
    ) -> Tensor:
        """[B, S, H, D] for this rank's queries, over the keys of all ranks."""
        self._check(q_BSHD.shape, k_BTHD.shape[1], mask, causal)
        whole_mask = None if mask is None else self.context.whole_mask(mask)
        q, k, v = _exchange_heads(self.context.ulysses, q_BSHD, k_BTHD, v_BTHD)
        return self._over_all_keys(q, k, v, whole_mask, causal, backend)

    def begin(
        self,
        streams: Sequence[HeadStream],
        rotary: Rotary,
        mask: Tensor | None,
        causal: bool,
        backend: AttentionBackend,
        *,
        later: bool,
    ) -> Callable[[], Tensor]:
        """`attend` of streams yet to be normed, rotated and joined; call it for the result.

        All is written into the message that exchanges heads, which travels while the caller does
        something else if that is for ``later``.
        """
        ulysses, first = self.context.ulysses, streams[0].q
        batch, _, heads, width = first.shape
        length = sum(stream.q.shape[1] for stream in streams)
        self._check(torch.Size((batch, length, heads, width)), length, mask, causal)
        whole_mask = None if mask is None else self.context.whole_mask(mask)
        if ulysses.size == 1:
            q, k, v = norm_rotate_join(streams, rotary)
            return lambda: self._over_all_keys(q, k, v, whole_mask, causal, backend)
        sent = empty_message(first, length, 3, ulysses.size)
        norm_rotate_into(streams, rotary, HeadRoom(*places(sent)))
        arriving = ulysses.deal_later(sent) if later else None
        received = None if later else ulysses.deal(sent)

        def finish() -> Tensor:
            whole = received if arriving is None else arriving()
            assert whole is not None
            q, k, v = whole_sequences(whole)
            return self._over_all_keys(q, k, v, whole_mask, causal, backend)

        return finish

    def _over_all_keys(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        whole_mask: Tensor | None,
        causal: bool,
        backend: AttentionBackend,
    ) -> Tensor:
        """What follows the exchange of heads, and the way back."""
        context, pieces = self.context, self._pieces(whole_mask)
        if context.ring.size == 1:
            (piece,) = pieces
            k, v = take(k, piece.kept, 1), take(v, piece.kept, 1)
            out = backend.attend(q, k, v, mask=piece.mask, causal=causal)
        else:
            out = ring_attention(q, k, v, pieces, context.ring, causal=causal, backend=backend)
        return sequence_per_rank(context.ulysses, out)

    def _pieces(self, whole_mask: Tensor | None) -> list[Piece]:
        """Which keys of each rank of the ring count: padding is left out, not masked."""
        shard = self.context.shard
        local = shard.local(*self.streams)
        pieces = []
        for parts in self.context.parts_of_ring:
            kept = shard.kept(self.streams, parts)
            mask = None
            if whole_mask is not None:
                own = whole_mask.narrow(-1, parts.start * local, len(parts) * local)
                mask = take(own, kept, -1)
            pieces.append(Piece(kept, mask))
        return pieces

    def _check(self, q: torch.Size, keys: int, mask: Tensor | None, causal: bool) -> None:
        """What cannot be right, or cannot be done, is said here and not computed."""
        local = self.context.shard.local(*self.streams)
        if keys != local:
            raise PipelineDefinitionError(
                f"{self.name} attends to {keys} keys on each rank, but a piece of its "
                f"streams ({' + '.join(self.streams)}) has {local} tokens. Name this layer's "
                "streams in SP_PLAN.attention, or make it USPAttention(replicated_keys=True) if "
                "all ranks hold all its keys"
            )
        if mask is not None and (mask.ndim != 4 or mask.shape[1:3] != (1, 1)):
            raise PipelineDefinitionError(
                f"{self.name}: a mask of shape {tuple(mask.shape)} differs between heads or "
                "queries; a split sequence takes key masks, boolean [B, 1, 1, T]"
            )
        if causal and (len(self.streams) > 1 or q[1] != keys):
            raise PipelineDefinitionError(
                f"{self.name} is causal over {' + '.join(self.streams)}: pieces of several streams "
                "do not lie in the order of the sequence, so it cannot be split"
            )
        check_heads(self.name, q[2], self.context.ulysses.size)


def check_heads(name: str, heads: int, ulysses: int) -> None:
    """Refuse a number of heads on each rank that does not divide; ``name`` is for the message.

    Raises:
        InvalidArgument: it does not.
    """
    if heads % ulysses:
        raise InvalidArgument(
            "ulysses_degree",
            ulysses,
            f"{name} has {heads} attention heads, which do not divide over {ulysses} ranks. Choose "
            "a ulysses_degree that divides them, and ring_degree for the rest: ring attention "
            "takes any number of heads",
        )


def _exchange_heads(group: Group, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    """One message where shapes allow it: each costs its latency."""
    if q.shape == k.shape:
        return heads_per_rank(group, q, k, v)
    return *heads_per_rank(group, q), *heads_per_rank(group, k, v)


def heads_per_rank(group: Group, *tensors: Tensor) -> Sequence[Tensor]:
    """Each [B, s, H, D] of a piece -> [B, S, H / ranks, D] of all pieces, in one all-to-all."""
    if group.size == 1:
        return tensors
    sent = empty_message(tensors[0], tensors[0].shape[1], len(tensors), group.size)
    for place, x in zip(places(sent), tensors, strict=True):
        copy_wide(place, x.unflatten(2, place.shape[2:4]))
    return whole_sequences(group.deal(sent))


def empty_message(like: Tensor, length: int, tensors: int, ranks: int) -> Tensor:
    """Room for an exchange of heads: ``length`` positions of tensors like ``like`` [B, s, H, D].

    Packed [rank, s, tensor, B, heads, D], so that what arrives is the joint sequence as it lies:
    no copy after it. (The result's strides are those of a fused q, k, v projection, which
    attention kernels take.)
    """
    batch, _, heads, width = like.shape
    return like.new_empty((ranks, length, tensors, batch, heads // ranks, width))


def places(message: Tensor) -> list[Tensor]:
    """Where each tensor of an `empty_message` goes: [B, s, ranks, H / ranks, D]."""
    return [message[:, :, index].permute(2, 1, 0, 3, 4) for index in range(message.shape[2])]


def whole_sequences(received: Tensor) -> list[Tensor]:
    """The tensors of a message that came from all ranks, each [B, S, H / ranks, D]; views."""
    return [x.transpose(0, 1) for x in received.flatten(0, 1).unbind(1)]


def sequence_per_rank(group: Group, x: Tensor) -> Tensor:
    """[B, S, h, D] of all pieces -> [B, s, h * ranks, D] of this rank's: the way back."""
    if group.size == 1:
        return x
    sent = x.transpose(0, 1).unflatten(0, (group.size, -1))
    received = group.deal(sent).permute(2, 1, 0, 3, 4)
    out = received.new_empty(received.shape)
    copy_wide(out, received)
    return out.flatten(2, 3)
