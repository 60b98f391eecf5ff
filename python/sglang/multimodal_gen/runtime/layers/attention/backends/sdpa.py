"""PyTorch's scaled dot product attention; picks cuDNN, flash or its own kernel by itself."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sglang.multimodal_gen.runtime.layers.attention.backends.with_lse import attend_with_lse


def attend(
    q_BSHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor, *, mask: Tensor | None, causal: bool
) -> Tensor:
    """Attention over T keys; [B, S, H, D]. ``mask`` as `USPAttention` takes it."""
    out_BHSD = F.scaled_dot_product_attention(
        q_BSHD.transpose(1, 2),
        k_BTHD.transpose(1, 2),
        v_BTHD.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
    )
    return out_BHSD.transpose(1, 2)


@dataclass(frozen=True, eq=False)
class TorchSDPA:
    """torch's attention as a backend: of its own choice, or one of its kernels alone.

    Masks, of which torch's flash kernel has no notion, are left to torch's choice then.
    """

    name: str = "torch_sdpa"
    kernel: SDPBackend | None = None
    dtypes: tuple[torch.dtype, ...] = ()
    gives_lse: bool = True
    graph_safe: bool = True

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool
    ) -> Tensor:
        """As `AttentionBackend.attend`."""
        with self._chosen(mask):
            return attend(q, k, v, mask=mask, causal=causal)

    def attend_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """As `AttentionBackend.attend_with_lse`."""
        with self._chosen(mask):
            return attend_with_lse(q, k, v, mask=mask, causal=causal)

    def _chosen(self, mask: Tensor | None) -> contextlib.AbstractContextManager[object]:
        maskless = self.kernel == SDPBackend.FLASH_ATTENTION and mask is not None
        if self.kernel is None or maskless:
            return contextlib.nullcontext()
        return sdpa_kernel(self.kernel)


SDPA = TorchSDPA()
"""torch's own choice, which every device and dtype has."""
