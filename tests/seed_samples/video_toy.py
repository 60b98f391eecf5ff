"""A denoiser of the Wan kind: 5-D latents become tokens inside, text is met by cross attention."""

from __future__ import annotations

import torch
from torch import nn

from sglang.multimodal_gen.runtime.layers.attention.usp import USPAttention
from sglang.multimodal_gen.runtime.layers.rotary_embedding import axial_rotary, rotate_pairs
from sglang.multimodal_gen.runtime.layers.sequence_plan import (
    RETURN,
    Gather,
    SequencePlan,
    Split,
)

HEAD = 8
AXES = (4, 2, 2)


class Attention(nn.Module):
    def __init__(self, dim, **options):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.attend = USPAttention(**options)

    def forward(self, x, context=None, rotary=None):
        context = x if context is None else context
        q = self.q(x).unflatten(-1, (-1, HEAD))
        k = self.k(context).unflatten(-1, (-1, HEAD))
        if rotary is not None:
            q, k = rotate_pairs(q, rotary), rotate_pairs(k, rotary)
        return self.out(self.attend(q, k, self.v(context).unflatten(-1, (-1, HEAD))).flatten(2))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.own = Attention(dim)
        self.cross = Attention(dim, replicated_keys=True)
        self.ff = nn.Linear(dim, dim)

    def forward(self, x, text, rotary):
        x = x + self.own(x, rotary=rotary)
        x = x + self.cross(x, text)
        return x + torch.tanh(self.ff(x))


class Rope(nn.Module):
    def forward(self, latents):
        _, _, frames, height, width = latents.shape
        axes = torch.arange(frames), torch.arange(height // 2), torch.arange(width // 2)
        return axial_rotary(torch.cartesian_prod(*axes).float(), AXES, 100.0)


class VideoToy(nn.Module):
    def __init__(self, dim=32, channels=3, text_width=12):
        super().__init__()
        self.patch = nn.Conv3d(channels, dim, (1, 2, 2), (1, 2, 2))
        self.rope = Rope()
        self.text_in = nn.Linear(text_width, dim)
        self.text_refiner = Attention(dim, replicated_keys=True)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm_out = nn.LayerNorm(dim)
        self.proj_out = nn.Linear(dim, channels * 4)

    def forward(self, hidden_states, encoder_hidden_states, timestep):
        batch, channels, frames, height, width = hidden_states.shape
        rotary = self.rope(hidden_states)
        text = self.text_in(encoder_hidden_states)
        text = text + self.text_refiner(text)
        x = self.patch(hidden_states).flatten(2).transpose(1, 2) + timestep[:, None, None]
        for block in self.blocks:
            x = block(x, text, rotary)
        x = self.proj_out(self.norm_out(x))
        x = x.view(batch, frames, height // 2, width // 2, channels, 2, 2)
        return x.permute(0, 4, 1, 2, 5, 3, 6).reshape(hidden_states.shape)


SP_PLAN = SequencePlan(
    streams=("video",),
    edges=(
        Split("x", "video", dim=1, at="blocks.0"),
        Split(RETURN, "video", dim=0, at="rope"),
        Gather(RETURN, "video", dim=1, at="proj_out"),
    ),
)
