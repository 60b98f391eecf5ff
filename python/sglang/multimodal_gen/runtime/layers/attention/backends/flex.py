"""torch's flex attention: masks by blocks, so that what is masked is not computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from sglang.multimodal_gen.runtime.layers.attention.backends import sdpa
from sglang.multimodal_gen.runtime.layers.attention.backends.with_lse import attend_with_lse


@dataclass(eq=False)
class FlexAttention:
    """Masked and causal attention by flex; without a mask, and for parts of a ring, torch's own.

    The blocks of a mask are found at its first layer and kept for the others. A CUDA graph would
    keep them for later masks too, so there can be none.

    Args:
        compiled: torch compiles the kernel at first use; else it is written out, which is slow.
    """

    compiled: bool = True
    name: str = "flex"
    dtypes: tuple[torch.dtype, ...] = ()
    gives_lse: bool = True
    graph_safe: bool = False
    masks_made: int = field(default=0, init=False)
    _blocks: tuple[Tensor | None, bool, tuple[int, int], Any] | None = field(
        default=None, init=False
    )
    _kernel: Callable[..., Any] | None = field(default=None, init=False)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool
    ) -> Tensor:
        """As `AttentionBackend.attend`; causal is aligned at the start."""
        if mask is None and not causal:
            return sdpa.attend(q, k, v, mask=None, causal=False)
        if self._kernel is None:
            self._kernel = torch.compile(flex_attention) if self.compiled else flex_attention
        blocks = self._blocks_of(mask, causal, (q.shape[1], k.shape[1]), q.device)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return self._kernel(q, k, v, block_mask=blocks).transpose(1, 2)

    def attend_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """As `AttentionBackend.attend_with_lse`, by torch's other kernels."""
        return attend_with_lse(q, k, v, mask=mask, causal=causal)

    def _blocks_of(
        self, mask: Tensor | None, causal: bool, size: tuple[int, int], device: torch.device
    ) -> Any:
        if self._blocks is not None:
            seen, was_causal, length, blocks = self._blocks
            if seen is mask and was_causal == causal and length == size:
                return blocks
        batch, heads = (1, 1) if mask is None else mask.shape[:2]

        def visible(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            seen = key == key if not causal else row >= key
            if mask is None:
                return seen
            picked = mask[_at(b, batch), _at(h, heads), _at(row, mask.shape[2]), key]
            return seen & picked

        blocks = create_block_mask(visible, batch, heads, *size, device, _compile=self.compiled)
        self.masks_made += 1
        self._blocks = (mask, causal, size, blocks)
        return blocks


def _at(index: Tensor, size: int) -> Tensor:
    """The index into a dimension that may be broadcast."""
    return index if size > 1 else index * 0
