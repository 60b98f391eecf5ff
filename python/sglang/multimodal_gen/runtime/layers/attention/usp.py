"""The one door to attention in every DiT."""

from __future__ import annotations

from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.attention.backends import sdpa


class USPAttention(nn.Module):
    """Attention over whole heads, without projections of its own.

    Model code calls this and nothing else, so that the kernel, and how a sequence is split over
    ranks (unified sequence parallelism: Ulysses x ring, Fang and Zhao 2024), stay its business.
    Layout: [batch, sequence, heads, head_dim], the layout in which projections produce it. Head
    counts are read off the tensors, never stored.
    """

    def __init__(self, *, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal

    def forward(
        self, q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """[B, S, H, D]; ``mask`` is boolean, True = attend, broadcastable to [B, H, S, T]."""
        return sdpa.attend(q_BSHD, k_BTHD, v_BTHD, mask=mask, causal=self.causal)
