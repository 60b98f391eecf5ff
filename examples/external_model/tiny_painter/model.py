"""The denoiser: image tokens that attend to each other and to the prompt's.

Legend: B batch, N image tokens, T text tokens, S = T + N, D model width, H heads, d head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.attention.usp import USPAttention
from sglang.multimodal_gen.runtime.layers.embeddings import (
    SINUSOID_CHANNELS,
    EmbeddingMLP,
    sinusoid,
)


class TinyPainterBlock(nn.Module):
    """Attention over both streams, then a feed-forward network."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm_2 = nn.LayerNorm(dim)
        self.widen, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.attend = USPAttention()

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D]."""
        q_BSHd, k_BSHd, v_BSHd = (
            part.unflatten(-1, (self.num_heads, -1))
            for part in self.qkv(self.norm_1(x_BSD)).chunk(3, dim=-1)
        )
        x_BSD = x_BSD + self.out(self.attend(q_BSHd, k_BSHd, v_BSHd).flatten(2))
        return x_BSD + self.narrow(F.gelu(self.widen(self.norm_2(x_BSD))))


class TinyPainterTransformer2DModel(nn.Module):
    """Predicts each image token's velocity; its arguments are the fields of ``config.json``."""

    def __init__(
        self,
        in_channels: int,
        joint_attention_dim: int,
        dim: int = 32,
        num_heads: int = 2,
        num_layers: int = 2,
    ) -> None:
        super().__init__()
        self.image_in = nn.Linear(in_channels, dim)
        self.text_in = nn.Linear(joint_attention_dim, dim)
        self.time_in = EmbeddingMLP(SINUSOID_CHANNELS, dim)
        self.blocks = nn.ModuleList(TinyPainterBlock(dim, num_heads) for _ in range(num_layers))
        self.image_out = nn.Linear(dim, in_channels)

    def forward(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, timestep: Tensor
    ) -> Tensor:
        """[B, N, C], [B, T, D_text], [B] in 0..1000 -> [B, N, C]."""
        time_BD = self.time_in(sinusoid(timestep).to(hidden_states.dtype))
        text_BTD = self.text_in(encoder_hidden_states)
        x_BSD = torch.cat([text_BTD, self.image_in(hidden_states)], dim=1) + time_BD[:, None]
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.image_out(x_BSD[:, text_BTD.shape[1] :])
