"""FLUX.1: a rectified-flow transformer of double-stream, then single-stream blocks.

Architecture: Black Forest Labs, FLUX.1 (2024). Reference class and checkpoint names: Diffusers'
``FluxTransformer2DModel``.

Legend: B batch, S sequence (text first, then image), T text tokens, N image tokens, D model width,
H heads, d head width, P pooled width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.cache.step_cache_plan import CachedBlocks, StepCachePlan
from sglang.multimodal_gen.runtime.cache.step_table import StepTable
from sglang.multimodal_gen.runtime.layers.attention.usp import USPAttention
from sglang.multimodal_gen.runtime.layers.embeddings import (
    SINUSOID_CHANNELS,
    EmbeddingMLP,
    sinusoid,
)
from sglang.multimodal_gen.runtime.layers.feed_forward import FeedForward
from sglang.multimodal_gen.runtime.layers.modulation import (
    AdaLayerNormContinuous,
    AdaLayerNormZero,
    in_full_company,
    shares,
)
from sglang.multimodal_gen.runtime.layers.ops.norm_modulate import add_gated
from sglang.multimodal_gen.runtime.layers.products import (
    add_gated_norm_modulate,
    concat_linear,
    gelu_linear,
    joint_parallel_linears,
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
from sglang.multimodal_gen.runtime.layers.tensor_parallel import Column, Row
from sglang.multimodal_gen.runtime.memory.layerwise import LayerwiseOffloadableModuleMixin

ROPE_THETA = 10_000.0
QK_NORM_EPS = 1e-6
POSITION_AXES = 3

# Adapters made for the authors' own code: their names, with fused q, k, v (and mlp), and with shift
# before scale in the last norm.
_ATTN, _SINGLE = "transformer_blocks.{}.attn.", "single_transformer_blocks.{}."
LORA_NAMES: dict[str, str | tuple[str, ...]] = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "double_blocks.{}.img_attn.qkv": (_ATTN + "to_q", _ATTN + "to_k", _ATTN + "to_v"),
    "double_blocks.{}.txt_attn.qkv": (
        _ATTN + "add_q_proj",
        _ATTN + "add_k_proj",
        _ATTN + "add_v_proj",
    ),
    "double_blocks.{}.img_attn.proj": _ATTN + "to_out.0",
    "double_blocks.{}.txt_attn.proj": _ATTN + "to_add_out",
    "double_blocks.{}.img_mod.lin": "transformer_blocks.{}.norm1.linear",
    "double_blocks.{}.txt_mod.lin": "transformer_blocks.{}.norm1_context.linear",
    "double_blocks.{}.img_mlp.0": "transformer_blocks.{}.ff.net.0.proj",
    "double_blocks.{}.img_mlp.2": "transformer_blocks.{}.ff.net.2",
    "double_blocks.{}.txt_mlp.0": "transformer_blocks.{}.ff_context.net.0.proj",
    "double_blocks.{}.txt_mlp.2": "transformer_blocks.{}.ff_context.net.2",
    "single_blocks.{}.linear1": (
        _SINGLE + "attn.to_q",
        _SINGLE + "attn.to_k",
        _SINGLE + "attn.to_v",
        _SINGLE + "proj_mlp",
    ),
    "single_blocks.{}.linear2": _SINGLE + "proj_out",
    "single_blocks.{}.modulation.lin": _SINGLE + "norm.linear",
    "final_layer.adaLN_modulation.1": ("norm_out.linear[1/2]", "norm_out.linear[0/2]"),
    "final_layer.linear": "proj_out",
    # XLabs' trainer names its attention processors.
    "double_blocks.{}.processor.qkv_lora1": (_ATTN + "to_q", _ATTN + "to_k", _ATTN + "to_v"),
    "double_blocks.{}.processor.qkv_lora2": (
        _ATTN + "add_q_proj",
        _ATTN + "add_k_proj",
        _ATTN + "add_v_proj",
    ),
    "double_blocks.{}.processor.proj_lora1": _ATTN + "to_out.0",
    "double_blocks.{}.processor.proj_lora2": _ATTN + "to_add_out",
    "single_blocks.{}.processor.qkv_lora": (
        _SINGLE + "attn.to_q",
        _SINGLE + "attn.to_k",
        _SINGLE + "attn.to_v",
    ),
    "single_blocks.{}.processor.proj_lora": _SINGLE + "proj_out",
}


class FluxTimeTextEmbed(nn.Module):
    """One vector for time, guidance (distilled checkpoints) and the pooled prompt."""

    def __init__(self, dim: int, pooled_dim: int, guidance_embeds: bool) -> None:
        super().__init__()
        self.timestep_embedder = EmbeddingMLP(SINUSOID_CHANNELS, dim)
        if guidance_embeds:
            self.guidance_embedder = EmbeddingMLP(SINUSOID_CHANNELS, dim)
        self.text_embedder = EmbeddingMLP(pooled_dim, dim)

    def forward(self, time_B: Tensor, guidance_B: Tensor | None, pooled_BP: Tensor) -> Tensor:
        """[B, D]; time and guidance are already multiplied by 1000."""
        dtype = pooled_BP.dtype
        temb_BD = self.timestep_embedder(sinusoid(time_B).to(dtype))
        if guidance_B is not None:
            temb_BD = temb_BD + self.guidance_embedder(sinusoid(guidance_B).to(dtype))
        return temb_BD + self.text_embedder(pooled_BP)


class FluxAttention(nn.Module):
    """Projections and per-head q/k norms; joint over both streams where there are two."""

    shared_input = (("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"))

    def __init__(self, dim: int, head_dim: int, double_stream: bool) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.norm_q = nn.RMSNorm(head_dim, eps=QK_NORM_EPS)
        self.norm_k = nn.RMSNorm(head_dim, eps=QK_NORM_EPS)
        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(dim, dim)
        self.to_v = nn.Linear(dim, dim)
        if double_stream:
            self.to_out = nn.ModuleList([nn.Linear(dim, dim)])
            self.norm_added_q = nn.RMSNorm(head_dim, eps=QK_NORM_EPS)
            self.norm_added_k = nn.RMSNorm(head_dim, eps=QK_NORM_EPS)
            self.add_q_proj = nn.Linear(dim, dim)
            self.add_k_proj = nn.Linear(dim, dim)
            self.add_v_proj = nn.Linear(dim, dim)
            self.to_add_out = nn.Linear(dim, dim)
        self.attend = USPAttention()

    def begin(self, x_BSD: Tensor, rotary: Rotary) -> Callable[[], Tensor]:
        """Self-attention of one stream, begun; what it returns gives [B, S, H, d], unprojected."""
        qkv = parallel_linears(x_BSD, self.to_q, self.to_k, self.to_v)
        return self.attend.begin((self._heads(qkv, self.norm_q, self.norm_k),), rotary)

    def joint(self, image_BND: Tensor, text_BTD: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Attention over text and image together; each stream has its own projections."""
        text_qkv, image_qkv = joint_parallel_linears(
            (text_BTD, (self.add_q_proj, self.add_k_proj, self.add_v_proj)),
            (image_BND, (self.to_q, self.to_k, self.to_v)),
        )
        streams = (
            self._heads(text_qkv, self.norm_added_q, self.norm_added_k),
            self._heads(image_qkv, self.norm_q, self.norm_k),
        )
        out_BSD = self.attend.joint(streams, rotary).flatten(2)
        text_length = text_BTD.shape[1]
        text_out, image_out = out_BSD[:, :text_length], out_BSD[:, text_length:]
        return self.to_out[0](image_out), self.to_add_out(text_out)

    def _heads(self, qkv: tuple[Tensor, ...], norm_q: nn.RMSNorm, norm_k: nn.RMSNorm) -> HeadStream:
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in qkv)
        return HeadStream(q, k, v, norm_q, norm_k)


class FluxTransformerBlock(nn.Module):
    """Double-stream block: text and image have their own weights and meet in attention."""

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.norm1 = AdaLayerNormZero(dim, count=2)
        self.norm1_context = AdaLayerNormZero(dim, count=2)
        self.attn = FluxAttention(dim, head_dim, double_stream=True)
        self.ff = FeedForward(dim)
        self.ff_context = FeedForward(dim)

    @property
    def modulations(self) -> tuple[AdaLayerNormZero, ...]:
        """Of the image, then of the text."""
        return self.norm1, self.norm1_context

    def forward(
        self, image_BND: Tensor, text_BTD: Tensor, conditioning_BC: Tensor, rotary: Rotary
    ) -> tuple[Tensor, Tensor]:
        """One block on both streams."""
        image_share, text_share = shares(conditioning_BC, [m.width for m in self.modulations])
        attn_mod, ff_mod = self.norm1(image_share)
        text_attn_mod, text_ff_mod = self.norm1_context(text_share)

        # Joint attention.
        image_out, text_out = self.attn.joint(
            norm_modulate(image_BND, attn_mod.shift, attn_mod.scale, into=self.attn.to_q),
            norm_modulate(
                text_BTD, text_attn_mod.shift, text_attn_mod.scale, into=self.attn.add_q_proj
            ),
            rotary,
        )
        image_BND, image_normed = add_gated_norm_modulate(
            image_BND, attn_mod.gate, image_out, ff_mod.shift, ff_mod.scale, into=self.ff.up
        )
        text_BTD, text_normed = add_gated_norm_modulate(
            text_BTD,
            text_attn_mod.gate,
            text_out,
            text_ff_mod.shift,
            text_ff_mod.scale,
            into=self.ff_context.up,
        )

        # Feed-forward.
        image_BND = add_gated(image_BND, ff_mod.gate, self.ff(image_normed))
        text_BTD = add_gated(text_BTD, text_ff_mod.gate, self.ff_context(text_normed))
        return image_BND, _within_fp16(text_BTD)


class FluxSingleTransformerBlock(nn.Module):
    """Single-stream block: attention and feed-forward side by side, one output projection."""

    def __init__(self, dim: int, head_dim: int, mlp_ratio: int = 4) -> None:
        super().__init__()
        self.norm = AdaLayerNormZero(dim, count=1)
        self.proj_mlp = nn.Linear(dim, mlp_ratio * dim)
        self.proj_out = nn.Linear(dim + mlp_ratio * dim, dim)
        self.attn = FluxAttention(dim, head_dim, double_stream=False)

    @property
    def modulations(self) -> tuple[AdaLayerNormZero, ...]:
        """The one that it has."""
        return (self.norm,)

    def forward(self, x_BSD: Tensor, conditioning_BC: Tensor, rotary: Rotary) -> Tensor:
        """One block on the joint sequence."""
        (mod,) = self.norm(conditioning_BC)
        normed = norm_modulate(x_BSD, mod.shift, mod.scale, into=self.proj_mlp)
        attended = self.attn.begin(normed, rotary)
        mlp = gelu_linear(normed, self.proj_mlp, into=self.proj_out)
        out_BSD = concat_linear((attended().flatten(2), mlp), self.proj_out)
        return _within_fp16(add_gated(x_BSD, mod.gate, out_BSD))


class FluxTransformer2DModel(nn.Module, LayerwiseOffloadableModuleMixin):
    """The FLUX.1 denoiser: predicts the flow's velocity at each packed latent token.

    Arguments are those of the checkpoint's ``config.json``.
    """

    lora_names = LORA_NAMES
    layer_names = ["transformer_blocks", "single_transformer_blocks"]
    graph_safe = True

    def __init__(
        self,
        patch_size: int = 1,
        in_channels: int = 64,
        out_channels: int | None = None,
        num_layers: int = 19,
        num_single_layers: int = 38,
        attention_head_dim: int = 128,
        num_attention_heads: int = 24,
        joint_attention_dim: int = 4096,
        pooled_projection_dim: int = 768,
        guidance_embeds: bool = False,
        axes_dims_rope: Sequence[int] = (16, 56, 56),
    ) -> None:
        super().__init__()
        if (
            len(axes_dims_rope) != POSITION_AXES
            or sum(axes_dims_rope) != attention_head_dim
            or any(dim <= 0 or dim % 2 for dim in axes_dims_rope)
        ):
            raise ValueError(
                f"axes_dims_rope={tuple(axes_dims_rope)} must be {POSITION_AXES} even numbers that "
                f"add up to attention_head_dim={attention_head_dim}"
            )
        if min(num_layers, num_single_layers) < 0:
            raise ValueError(f"num_layers={num_layers}, num_single_layers={num_single_layers}")
        dim = num_attention_heads * attention_head_dim
        out_channels = in_channels if out_channels is None else out_channels
        self.num_attention_heads = num_attention_heads
        self.axes_dims_rope = tuple(axes_dims_rope)
        self.guidance_embeds = guidance_embeds
        self.time_text_embed = FluxTimeTextEmbed(dim, pooled_projection_dim, guidance_embeds)
        self.context_embedder = nn.Linear(joint_attention_dim, dim)
        self.x_embedder = nn.Linear(in_channels, dim)
        self.transformer_blocks = nn.ModuleList(
            FluxTransformerBlock(dim, attention_head_dim) for _ in range(num_layers)
        )
        self.single_transformer_blocks = nn.ModuleList(
            FluxSingleTransformerBlock(dim, attention_head_dim) for _ in range(num_single_layers)
        )
        self.norm_out = AdaLayerNormContinuous(dim, dim)
        self.proj_out = nn.Linear(dim, patch_size * patch_size * out_channels)
        self.modulation_widths = tuple(sum(m.width for m in ms) for ms in self._modulations())

    def rotary_embedding(self, text_length: int, height: int, width: int) -> Rotary:
        """Angles of the joint sequence for an image of ``height`` x ``width`` packed tokens.

        Text stands at (0, 0, 0), which does not rotate; image token (y, x) stands at (0, y, x).
        """
        device = self.x_embedder.weight.device
        image_ids = torch.zeros(height, width, 3, device=device)
        image_ids[..., 1] = torch.arange(height, device=device)[:, None]
        image_ids[..., 2] = torch.arange(width, device=device)
        text_ids = torch.zeros(text_length, 3, device=device)
        ids_S3 = torch.cat((text_ids, image_ids.flatten(0, 1)))
        return axial_rotary(ids_S3, self.axes_dims_rope, ROPE_THETA)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        pooled_projections: Tensor,
        timestep: Tensor,
        guidance: Tensor | None = None,
        *,
        rotary: Rotary,
        modulation: Tensor | None = None,
    ) -> Tensor:
        """Velocity at the image tokens, [B, N, out_channels].

        ``hidden_states`` [B, N, in_channels], ``encoder_hidden_states`` [B, T, text width],
        ``pooled_projections`` [B, P], ``timestep`` [B] in 0..1, ``guidance`` [B] only for
        checkpoints with ``guidance_embeds``, ``rotary`` from :meth:`rotary_embedding`,
        ``modulation`` from :meth:`modulation_rows`, which stands for all that depends on time,
        guidance and the pooled prompt.
        """
        conditioning_BC = modulation
        if conditioning_BC is None:
            given = (timestep, pooled_projections, guidance)
            conditioning_BC = in_full_company(self._silu_temb, *given)
        double, single = self.transformer_blocks, self.single_transformer_blocks
        *of_blocks, last = shares(conditioning_BC, self.modulation_widths)

        image_BND = self.x_embedder(hidden_states)
        text_BTD = self.context_embedder(encoder_hidden_states)
        for block, share in zip(double, of_blocks[: len(double)], strict=True):
            image_BND, text_BTD = block(image_BND, text_BTD, share, rotary)

        x_BSD = torch.cat((text_BTD, image_BND), dim=1)
        for block, share in zip(single, of_blocks[len(double) :], strict=True):
            x_BSD = block(x_BSD, share, rotary)

        image_BND = x_BSD[:, encoder_hidden_states.shape[1] :]
        return self.proj_out(self.norm_out(image_BND, last))

    def modulation_rows(
        self, timestep: Tensor, pooled_projections: Tensor, guidance: Tensor | None = None
    ) -> Tensor:
        """What modulates every block and the last norm, end to end, [B, widths of all]."""
        given = (timestep, pooled_projections, guidance)
        silu_temb_BD = in_full_company(self._silu_temb, *given)
        norms = chain.from_iterable(self._modulations())
        return torch.cat([norm.rows(silu_temb_BD) for norm in norms], dim=-1)

    def _modulations(self) -> list[tuple[AdaLayerNormZero | AdaLayerNormContinuous, ...]]:
        """What modulates each block, and the last norm: the order of rows that lie end to end."""
        blocks = (*self.transformer_blocks, *self.single_transformer_blocks)
        return [*(block.modulations for block in blocks), (self.norm_out,)]  # pyright: ignore[reportReturnType] (a ModuleList forgets its type)

    def _silu_temb(self, timestep: Tensor, pooled_BP: Tensor, guidance: Tensor | None) -> Tensor:
        # Time and guidance are cast *before* the factor 1000 comes back, as in the reference:
        # bf16 turns a guidance of 3.5 into 3504, and the checkpoint was distilled with that.
        dtype = pooled_BP.dtype
        time_B = timestep.to(dtype) * 1000
        guidance_B = None if guidance is None else guidance.to(dtype) * 1000
        return F.silu(self.time_text_embed(time_B, guidance_B, pooled_BP))


def _within_fp16(x: Tensor) -> Tensor:
    """float16 overflows to infinity in late blocks: the reference clips there, and only there."""
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


# Of 11.9 B parameters 0.5% stay whole: the embedders of image, text and time, the last norm and
# projection, and the norms of a head.
TP_PLAN = {
    "*.attn.to_[qkv]": Column(heads="num_attention_heads"),
    "*.attn.add_[qkv]_proj": Column(heads="num_attention_heads"),
    "*.attn.to_out.0": Row(),
    "*.attn.to_add_out": Row(),
    "*.ff*.net.0.proj": Column(),
    "*.ff*.net.2": Row(),
    "single_transformer_blocks.*.proj_mlp": Column(),
    "single_transformer_blocks.*.proj_out": Row(blocks=("attn.to_v", "proj_mlp")),
    # 3.2 B parameters in linears that run once a step: gathered, in the order of the chunks.
    "*transformer_blocks.*.norm*.linear": Column(gather_output=True),
}

SP_PLAN = SequencePlan(
    streams=("text", "image"),
    edges=(
        Split("encoder_hidden_states", "text", dim=1),
        Split("hidden_states", "image", dim=1),
        Split("rotary", ("text", "image"), dim=0),
        Gather(RETURN, "image", dim=1),
    ),
)


def _modulated_input(block: FluxTransformerBlock, image_BND: Tensor, *args: Tensor) -> Tensor:
    _text_BTD, conditioning_BC, _rotary = args
    image_share, _ = shares(conditioning_BC, [m.width for m in block.modulations])
    attn_mod, _ = block.norm1(image_share)
    return norm_modulate(image_BND, attn_mod.shift, attn_mod.scale)


STEP_CACHE = StepCachePlan(
    blocks=(
        CachedBlocks(
            "transformer_blocks", carries=("image_BND", "text_BTD"), per_image=("conditioning_BC",)
        ),
        CachedBlocks(
            "single_transformer_blocks", carries=("x_BSD",), per_image=("conditioning_BC",)
        ),
    ),
    streams=("image",),
    signal=_modulated_input,
    # TeaCache's fit to FLUX.1-dev (Liu et al. 2024).
    polynomial=(498.651651, -283.781631, 55.8554382, -3.82021401, 0.264230861),
)

STEP_TABLE = StepTable(argument="modulation", method="modulation_rows")

EntryClass = FluxTransformer2DModel
