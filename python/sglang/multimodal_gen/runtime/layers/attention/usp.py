"""The one door to attention in every DiT."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.attention.backends.backend import AttentionBackend
from sglang.multimodal_gen.runtime.layers.attention.backends.sdpa import SDPA
from sglang.multimodal_gen.runtime.layers.attention.split_sequence import SplitAttention
from sglang.multimodal_gen.runtime.layers.qk_norm import HeadStream, norm_rotate_join
from sglang.multimodal_gen.runtime.layers.rotary_embedding import Rotary
from sglang.multimodal_gen.runtime.layers.sequence_shard import take


class USPAttention(nn.Module):
    """Attention over whole heads, without projections of its own.

    Model code calls this and nothing else, so that the kernel, and how a sequence is split over
    ranks (unified sequence parallelism: Ulysses x ring, Fang and Zhao 2024), stay its business.
    Layout: [batch, sequence, heads, head_dim], the layout in which projections produce it. Head
    counts are read off the tensors, never stored.

    Args:
        causal: no query sees a later key.
        replicated_keys: every rank holds all keys, though queries may be split (cross attention to
            a text that is not), so there is nothing to send.
    """

    def __init__(self, *, causal: bool = False, replicated_keys: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.replicated_keys = replicated_keys
        self.backend: AttentionBackend = SDPA
        """What computes; put in when the pipeline is built."""
        self._split: SplitAttention | None = None

    def bind(self, split: SplitAttention) -> None:
        """Take part in splitting the sequence from now on; called once, at build."""
        if not self.replicated_keys:
            self._split = split

    @property
    def is_split(self) -> bool:
        """Whether this layer's sequence is split over ranks."""
        return self._split is not None

    def without_padding(self, x_BSD: Tensor, streams: Sequence[str]) -> Tensor:
        """This rank's pieces of streams [B, S, ...] without what was added to make them divide.

        Only while a forward pass is on its way, which tells the streams' lengths.
        """
        if self._split is None:
            return x_BSD
        context = self._split.context
        rank = context.sp.rank
        return take(x_BSD, context.shard.kept(streams, range(rank, rank + 1)), 1)

    def forward(
        self, q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """[B, S, H, D]; ``mask`` is boolean, True = attend, broadcastable to [B, H, S, T].

        Where the sequence is split, S and T are this rank's piece, and masks are [B, 1, 1, T].
        """
        if self._split is not None:
            return self._split.attend(q_BSHD, k_BTHD, v_BTHD, mask, self.causal, self.backend)
        return self.backend.attend(q_BSHD, k_BTHD, v_BTHD, mask=mask, causal=self.causal)

    def joint(
        self, streams: Sequence[HeadStream], rotary: Rotary, mask: Tensor | None = None
    ) -> Tensor:
        """Of streams over themselves, joined in their order; [B, S, H, D].

        Queries and keys are normed and rotated on the way, straight to where attention, or the
        message to other ranks, wants them. ``rotary`` has a row for each joint position.
        """
        if self._split is not None:
            backend = self.backend
            return self._split.begin(streams, rotary, mask, self.causal, backend, later=False)()
        return self(*norm_rotate_join(streams, rotary), mask)

    def begin(
        self, streams: Sequence[HeadStream], rotary: Rotary, mask: Tensor | None = None
    ) -> Callable[[], Tensor]:
        """`joint`, begun: call what it returns for the result.

        What does not need the result goes in between: messages to other ranks travel meanwhile.
        """
        if self._split is not None:
            backend = self.backend
            return self._split.begin(streams, rotary, mask, self.causal, backend, later=True)
        q, k, v = norm_rotate_join(streams, rotary)
        return lambda: self(q, k, v, mask)
