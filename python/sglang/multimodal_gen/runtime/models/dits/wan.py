"""Wan 2.1 and 2.2: a flow-matching transformer over patches of a clip, with text cross-attention.

Architecture: Wan Team, "Wan: Open and Advanced Large-Scale Video Generative Models" (2025).
Reference class and checkpoint names: Diffusers' ``WanTransformer3DModel``.

Legend: B batch, C channels, F latent frames, h x w latent pixels, S patches of the clip, T text
tokens, I image tokens, D model width, H heads, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.cache.step_cache_plan import CachedBlocks, StepCachePlan
from sglang.multimodal_gen.runtime.layers.attention.usp import USPAttention
from sglang.multimodal_gen.runtime.layers.embeddings import EmbeddingMLP, sinusoid
from sglang.multimodal_gen.runtime.layers.feed_forward import FeedForward
from sglang.multimodal_gen.runtime.layers.ops.norm_modulate import add_gated
from sglang.multimodal_gen.runtime.layers.products import (
    add_gated_norm_modulate,
    norm_modulate,
    parallel_linears,
)
from sglang.multimodal_gen.runtime.layers.qk_norm import HeadStream
from sglang.multimodal_gen.runtime.layers.rotary_embedding import Rotary, axial_rotary
from sglang.multimodal_gen.runtime.layers.sequence_plan import (
    RETURN,
    Gather,
    SequencePlan,
    Split,
)
from sglang.multimodal_gen.runtime.layers.tensor_parallel import Column, NormAcross, Row
from sglang.multimodal_gen.runtime.memory.layerwise import LayerwiseOffloadableModuleMixin

ROPE_THETA = 10_000.0
IMAGE_NORM_EPS = 1e-5

# Adapters made for the authors' own code, as lightx2v and ComfyUI name them.
_BLOCK = "blocks.{}."
LORA_NAMES: dict[str, str | tuple[str, ...]] = {
    _BLOCK + "self_attn.q": _BLOCK + "attn1.to_q",
    _BLOCK + "self_attn.k": _BLOCK + "attn1.to_k",
    _BLOCK + "self_attn.v": _BLOCK + "attn1.to_v",
    _BLOCK + "self_attn.o": _BLOCK + "attn1.to_out.0",
    _BLOCK + "cross_attn.q": _BLOCK + "attn2.to_q",
    _BLOCK + "cross_attn.k": _BLOCK + "attn2.to_k",
    _BLOCK + "cross_attn.v": _BLOCK + "attn2.to_v",
    _BLOCK + "cross_attn.o": _BLOCK + "attn2.to_out.0",
    _BLOCK + "cross_attn.k_img": _BLOCK + "attn2.add_k_proj",
    _BLOCK + "cross_attn.v_img": _BLOCK + "attn2.add_v_proj",
    _BLOCK + "ffn.0": _BLOCK + "ffn.net.0.proj",
    _BLOCK + "ffn.2": _BLOCK + "ffn.net.2",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "head.head": "proj_out",
}


class WanPatchEmbedding(nn.Conv3d):
    """A convolution whose patches do not overlap, as one product; its weight's checkpoint shape."""

    def __init__(self, in_channels: int, dim: int, patch_size: tuple[int, int, int]) -> None:
        super().__init__(in_channels, dim, patch_size, patch_size)

    def forward(self, input: Tensor) -> Tensor:
        """[B, C, F, H, W] -> [B, S, D]; what fills no patch is left out."""
        patch_sizes, clip_BCFHW = self.kernel_size, input
        for axis, size in enumerate(patch_sizes, 2):
            whole = clip_BCFHW.shape[axis] // size * size
            clip_BCFHW = clip_BCFHW.narrow(axis, 0, whole)
        depth, height, width = patch_sizes
        x = (
            clip_BCFHW.unflatten(4, (-1, width))
            .unflatten(3, (-1, height))
            .unflatten(2, (-1, depth))
        )
        # (batch, channel, time, in it, row, in it, column, in it) to (batch, patch, weight's order)
        patches = x.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)
        return F.linear(patches, self.weight.flatten(1), self.bias)


class WanTextProjection(nn.Module):
    """Text features to the model's width: linear, GELU (tanh), linear."""

    def __init__(self, text_dim: int, dim: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(text_dim, dim)
        self.linear_2 = nn.Linear(dim, dim)

    def forward(self, text_BTE: Tensor) -> Tensor:
        """[B, T, text_dim] -> [B, T, D]."""
        return self.linear_2(F.gelu(self.linear_1(text_BTE), approximate="tanh"))


class WanImageFeedForward(nn.Module):
    """Linear, GELU (exact), linear; checkpoint names ``net.0.proj`` and ``net.2``."""

    def __init__(self, image_dim: int, dim: int) -> None:
        super().__init__()
        first = nn.ModuleDict({"proj": nn.Linear(image_dim, image_dim)})
        self.net = nn.ModuleList([first, nn.Identity(), nn.Linear(image_dim, dim)])

    def forward(self, x: Tensor) -> Tensor:
        """[B, I, image_dim] -> [B, I, D]."""
        first, _, last = self.net
        assert isinstance(first, nn.ModuleDict)
        return last(F.gelu(first["proj"](x)))


class WanImageEmbedding(nn.Module):
    """CLIP's view of one picture, or of two end to end where positions are learned for both."""

    def __init__(self, image_dim: int, dim: int, positions: int | None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(image_dim, eps=IMAGE_NORM_EPS)
        self.ff = WanImageFeedForward(image_dim, dim)
        self.norm2 = nn.LayerNorm(dim, eps=IMAGE_NORM_EPS)
        if positions is not None:
            self.pos_embed = nn.Parameter(torch.zeros(1, positions, image_dim))
        else:
            self.register_parameter("pos_embed", None)

    def forward(self, image_BIE: Tensor) -> Tensor:
        """[B, I, image_dim] -> [B, I, D]; pictures of one request are neighbours in the batch."""
        if self.pos_embed is not None:
            image_BIE = image_BIE.reshape(-1, self.pos_embed.shape[1], image_BIE.shape[-1])
            image_BIE = image_BIE + self.pos_embed
        return _layer_norm(self.ff(_layer_norm(image_BIE, self.norm1)), self.norm2)


class WanConditionEmbedder(nn.Module):
    """Time, text and image as the blocks take them."""

    def __init__(
        self,
        dim: int,
        time_channels: int,
        text_dim: int,
        image_dim: int | None,
        image_positions: int | None,
    ) -> None:
        super().__init__()
        self.time_channels = time_channels
        self.time_embedder = EmbeddingMLP(time_channels, dim)
        self.time_proj = nn.Linear(dim, 6 * dim)
        self.text_embedder = WanTextProjection(text_dim, dim)
        if image_dim is not None:
            self.image_embedder = WanImageEmbedding(image_dim, dim, image_positions)

    def time(self, timestep: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Timesteps [...] (0 to 1000) -> [..., D] and what modulates a block, [..., 6, D].

        The embedder is float32 in half precision too; what leaves it is in the model's ``dtype``.
        """
        wave = sinusoid(timestep.flatten(), self.time_channels)
        wide = self.time_embedder.linear_1.weight.dtype
        temb = self.time_embedder(wave.to(wide)).to(dtype).unflatten(0, timestep.shape)
        return temb, self.time_proj(F.silu(temb)).unflatten(-1, (6, -1))


class WanAttention(nn.Module):
    """Projections, and norms of q and k across all heads.

    Args:
        cross: attends to text, of which each rank holds all.
        image_dim: width of the image tokens that it also attends to; None for none.
    """

    shared_input = (("to_q", "to_k", "to_v"), ("add_k_proj", "add_v_proj"))

    def __init__(
        self, dim: int, head_dim: int, eps: float, *, cross: bool, image_dim: int | None = None
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(dim, dim)
        self.to_v = nn.Linear(dim, dim)
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])
        self.norm_q = nn.RMSNorm(dim, eps=eps)
        self.norm_k = nn.RMSNorm(dim, eps=eps)
        self.attend = USPAttention(replicated_keys=cross)
        if image_dim is not None:
            self.add_k_proj = nn.Linear(image_dim, dim)
            self.add_v_proj = nn.Linear(image_dim, dim)
            self.norm_added_k = nn.RMSNorm(dim, eps=eps)

    def self_attention(self, x_BSD: Tensor, rotary: Rotary) -> Tensor:
        """Over the patches of the clip; [B, S, D]."""
        qkv = parallel_linears(x_BSD, self.to_q, self.to_k, self.to_v)
        q, k, v = (self._heads(x) for x in qkv)
        out = self.attend.joint((HeadStream(q, k, v, self.norm_q, self.norm_k),), rotary)
        return self.to_out[0](out.flatten(2))

    def cross_attention(self, x_BSD: Tensor, text_BTD: Tensor, image_BID: Tensor | None) -> Tensor:
        """Over the text, and beside it over the image: two softmaxes, added; [B, S, D]."""
        q = self._heads(self.norm_q(self.to_q(x_BSD)))
        k, v = parallel_linears(text_BTD, self.to_k, self.to_v)
        out = self.attend(q, self._heads(self.norm_k(k)), self._heads(v)).flatten(2)
        if image_BID is not None:
            k, v = parallel_linears(image_BID, self.add_k_proj, self.add_v_proj)
            k, v = self._heads(self.norm_added_k(k)), self._heads(v)
            out = out + self.attend(q, k, v).flatten(2)
        return self.to_out[0](out)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class WanTransformerBlock(nn.Module):
    """Self-attention, cross-attention, feed-forward; the first and last are modulated by time."""

    def __init__(
        self,
        dim: int,
        head_dim: int,
        ffn_dim: int,
        eps: float,
        *,
        cross_attn_norm: bool,
        image_dim: int | None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.attn1 = WanAttention(dim, head_dim, eps, cross=False)
        self.attn2 = WanAttention(dim, head_dim, eps, cross=True, image_dim=image_dim)
        self.norm2 = nn.LayerNorm(dim, eps=eps) if cross_attn_norm else nn.Identity()
        self.ffn = FeedForward(dim, ffn_dim)
        self.scale_shift_table = nn.Parameter(torch.zeros(1, 6, dim))

    def forward(
        self,
        x_BSD: Tensor,
        text_BTD: Tensor,
        image_BID: Tensor | None,
        time_proj: Tensor,
        rotary: Rotary,
    ) -> Tensor:
        """One block; ``time_proj`` is [B, 1, 6, D], or [B, S, 6, D] with a time for each token."""
        # float32, beside tokens in half precision: norms and sums are computed in it.
        modulation = (self.scale_shift_table.float() + time_proj).unbind(-2)
        shift, scale, gate, ff_shift, ff_scale, ff_gate = modulation
        eps, up = self.eps, self.ffn.up

        normed = norm_modulate(x_BSD, shift, scale, into=self.attn1.to_q, eps=eps)
        update = self.attn1.self_attention(normed, rotary)
        x_BSD, normed = self._add_then_norm(x_BSD, gate, update)

        update = self.attn2.cross_attention(normed, text_BTD, image_BID)
        x_BSD, normed = add_gated_norm_modulate(
            x_BSD, None, update, ff_shift, ff_scale, into=up, eps=eps
        )
        return add_gated(x_BSD, ff_gate, self.ffn(normed))

    def _add_then_norm(self, x_BSD: Tensor, gate: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        """The gated sum, and what cross-attention reads of it."""
        if not isinstance(self.norm2, nn.LayerNorm):
            x_BSD = add_gated(x_BSD, gate, update)
            return x_BSD, x_BSD
        shift, scale = self.norm2.bias.float(), self.norm2.weight.float()
        return add_gated_norm_modulate(
            x_BSD, gate, update, shift, scale, into=self.attn2.to_q, eps=self.eps, affine=True
        )


class WanTransformer3DModel(nn.Module, LayerwiseOffloadableModuleMixin):
    """The Wan denoiser: predicts the flow's velocity at each latent pixel of a clip.

    Arguments are those of the checkpoint's ``config.json``.
    """

    lora_names = LORA_NAMES
    layer_names = ["blocks"]
    graph_safe = True
    _keep_in_fp32_modules = ["time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"]

    def __init__(
        self,
        patch_size: Sequence[int] = (1, 2, 2),
        num_attention_heads: int = 40,
        attention_head_dim: int = 128,
        in_channels: int = 16,
        out_channels: int = 16,
        text_dim: int = 4096,
        freq_dim: int = 256,
        ffn_dim: int = 13824,
        num_layers: int = 40,
        cross_attn_norm: bool = True,
        qk_norm: str | None = "rms_norm_across_heads",
        eps: float = 1e-6,
        image_dim: int | None = None,
        added_kv_proj_dim: int | None = None,
        rope_max_seq_len: int = 1024,
        pos_embed_seq_len: int | None = None,
    ) -> None:
        super().__init__()
        if qk_norm != "rms_norm_across_heads":
            raise ValueError(f"qk_norm={qk_norm!r}: every published Wan is rms_norm_across_heads")
        if num_layers < 0 or attention_head_dim < 6 or attention_head_dim % 2:
            raise ValueError(f"num_layers={num_layers}, attention_head_dim={attention_head_dim}")
        if len(patch_size) != 3 or min(patch_size) < 1:
            raise ValueError(f"patch_size={tuple(patch_size)} must be three positive numbers")
        dim = num_attention_heads * attention_head_dim
        self.num_attention_heads = num_attention_heads
        self.head_dim = attention_head_dim
        depth, height, width = patch_size
        self.patch_size = (depth, height, width)
        self.max_positions = rope_max_seq_len
        self.in_channels, self.eps = in_channels, eps
        self.patch_embedding = WanPatchEmbedding(in_channels, dim, self.patch_size)
        self.condition_embedder = WanConditionEmbedder(
            dim, freq_dim, text_dim, image_dim, pos_embed_seq_len
        )
        self.blocks = nn.ModuleList(
            WanTransformerBlock(
                dim,
                attention_head_dim,
                ffn_dim,
                eps,
                cross_attn_norm=cross_attn_norm,
                image_dim=added_kv_proj_dim,
            )
            for _ in range(num_layers)
        )
        self.scale_shift_table = nn.Parameter(torch.zeros(1, 2, dim))
        self.proj_out = nn.Linear(dim, out_channels * self.patch_size[0] * self.patch_size[1]
                                  * self.patch_size[2])  # fmt: skip

    @property
    def takes_image_tokens(self) -> bool:
        """Whether it attends to CLIP's view of pictures."""
        return hasattr(self.condition_embedder, "image_embedder")

    def rotary_embedding(self, frames: int, height: int, width: int) -> Rotary:
        """Angles of the patches of a clip of latent size ``frames`` x ``height`` x ``width``.

        Height and width have a third of a head's channels each, time the rest.

        Raises:
            ValueError: an axis has more patches than the checkpoint knows positions.
        """
        grid = [n // p for n, p in zip((frames, height, width), self.patch_size, strict=True)]
        if max(grid) > self.max_positions:
            raise ValueError(f"{grid} patches; rope_max_seq_len={self.max_positions} along an axis")
        device = self.proj_out.weight.device
        ids = torch.stack(
            torch.meshgrid(*(torch.arange(n, device=device) for n in grid), indexing="ij"), dim=-1
        )
        space = 2 * (self.head_dim // 6)
        axes = (self.head_dim - 2 * space, space, space)
        return axial_rotary(ids.flatten(0, 2), axes, ROPE_THETA)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_image: Tensor | None = None,
        token_timestep: Tensor | None = None,
        *,
        rotary: Rotary,
    ) -> Tensor:
        """Velocity, [B, out_channels, F, h, w].

        ``hidden_states`` [B, in_channels, F, h, w], ``timestep`` [B] in 0..1000,
        ``encoder_hidden_states`` [B, T, text_dim], ``encoder_hidden_states_image``
        [B, I, image_dim] (two pictures: [2B, I, image_dim]), ``token_timestep`` [B, S] where tokens
        have times of their own (2.2's 5B), ``rotary`` from :meth:`rotary_embedding`.
        """
        dtype = hidden_states.dtype
        x_BSD = self.patch_embedding(hidden_states)
        sizes = zip(hidden_states.shape[2:], self.patch_size, strict=True)
        grid = torch.Size(size // patch for size, patch in sizes)
        embed = self.condition_embedder
        times = timestep[:, None] if token_timestep is None else token_timestep
        temb, time_proj = embed.time(times, encoder_hidden_states.dtype)
        text_BTD = embed.text_embedder(encoder_hidden_states)
        image_BID = None
        if encoder_hidden_states_image is not None:
            image_BID = embed.image_embedder(encoder_hidden_states_image)
            image_BID = image_BID.reshape(len(x_BSD), -1, image_BID.shape[-1])

        for block in self.blocks:
            x_BSD = block(x_BSD, text_BTD, image_BID, time_proj, rotary)

        shift, scale = (self.scale_shift_table + temb[..., None, :]).unbind(-2)
        normed = norm_modulate(x_BSD, shift, scale, into=self.proj_out, eps=self.eps)
        patches = self.proj_out(normed.to(dtype))
        return self._clip(patches, grid)

    def _clip(self, patches_BSP: Tensor, grid: torch.Size) -> Tensor:
        """Patches to the clip: a token's outputs are (time, row, column, channel) within it."""
        x = patches_BSP.unflatten(-1, (*self.patch_size, -1)).unflatten(1, grid)
        x = x.permute(0, 7, 1, 4, 2, 5, 3, 6)
        return x.flatten(6, 7).flatten(4, 5).flatten(2, 3)


def _layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """A norm of float32 parameters, computed in float32, in the dtype of ``x``."""
    weight, bias = norm.weight.float(), norm.bias.float()
    return F.layer_norm(x.float(), norm.normalized_shape, weight, bias, norm.eps).to(x.dtype)


TP_PLAN = {
    # to_q, to_k, to_v; and add_k_proj, add_v_proj, which only some checkpoints have.
    "blocks.*.attn[12].[ta][od]*_[qkv]*": Column(heads="num_attention_heads"),
    "blocks.*.attn[12].norm_*": NormAcross(heads="num_attention_heads"),
    "blocks.*.attn[12].to_out.0": Row(),
    "blocks.*.ffn.net.0.proj": Column(),
    "blocks.*.ffn.net.2": Row(),
}

# Text and image are small: each rank holds all of them.
SP_PLAN = SequencePlan(
    streams=("video",),
    edges=(
        Split("rotary", "video", dim=0),
        Split("token_timestep", "video", dim=1),
        Split("x_BSD", "video", dim=1, at="blocks.0"),
        Gather(RETURN, "video", dim=1, at="proj_out"),
    ),
)

STEP_CACHE = StepCachePlan(
    blocks=(
        CachedBlocks(
            "blocks", carries=("x_BSD",), per_image=("text_BTD", "image_BID", "time_proj")
        ),
    ),
    streams=("video",),
)

EntryClass = WanTransformer3DModel
