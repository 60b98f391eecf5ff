"""PyTorch's scaled dot product attention; picks cuDNN, flash or its own kernel by itself."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


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
