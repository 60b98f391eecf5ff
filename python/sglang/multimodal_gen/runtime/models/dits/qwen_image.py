"""Qwen-Image: a rectified-flow transformer of double-stream blocks, for pictures and their edits.

Architecture: Qwen team, "Qwen-Image Technical Report" (2025). Reference class and checkpoint
names: Diffusers' ``QwenImageTransformer2DModel``.

Legend: B batch, S sequence (text first, then the picture to make, then reference pictures), T text
tokens, N tokens of the picture to make, R tokens of references, D model width, H heads, d head
width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

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
    AdaLN,
    in_full_company,
    rows_of,
    shares,
)
from sglang.multimodal_gen.runtime.layers.ops.norm_modulate import add_gated
from sglang.multimodal_gen.runtime.layers.products import (
    add_gated_norm_modulate,
    joint_parallel_linears,
    norm_modulate,
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
NORM_EPS = 1e-6
POSITION_AXES = 3
TIME_SCALE = 1000.0

Grid = tuple[int, int]
"""Height and width of a picture in packed tokens."""

# Diffusers', lightx2v's, ComfyUI's and Kohya's adapters all use the checkpoint's own names, with
# their own prefixes and endings. Some trainers drop the index of the one output projection.
LORA_NAMES: dict[str, str | tuple[str, ...]] = {
    "transformer_blocks.{}.attn.to_out": "transformer_blocks.{}.attn.to_out.0",
}


class PictureRotary(NamedTuple):
    """Angles by stream, so that each can be split by itself; ``reference`` may have no rows."""

    text: Rotary
    image: Rotary
    reference: Rotary

    def joined(self) -> Rotary:
        """Angles of the joint sequence."""
        return Rotary(
            torch.cat([stream.cos for stream in self]), torch.cat([stream.sin for stream in self])
        )


class TokenModulation(NamedTuple):
    """Shift, scale and gate of a stream that falls into stretches with modulations of their own."""

    parts: tuple[AdaLN, ...]
    lengths: tuple[int, ...]

    def norm(self, x_BSD: Tensor, into: nn.Module) -> Tensor:
        """The norm, modulated, for a linear that reads it."""
        if len(self.parts) == 1:
            return norm_modulate(x_BSD, self.parts[0].shift, self.parts[0].scale, into)
        return self._each(lambda part, x: norm_modulate(x, part.shift, part.scale), x_BSD)

    def add(self, x_BSD: Tensor, update_BSD: Tensor) -> Tensor:
        """The residual, with the gated update added."""
        return self._each(lambda part, x, u: add_gated(x, part.gate, u), x_BSD, update_BSD)

    def add_then_norm(
        self, x_BSD: Tensor, update_BSD: Tensor, following: TokenModulation, into: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """`add`, and the result as the ``following`` modulation norms it."""
        if len(self.parts) == 1:
            (own,), (then,) = self.parts, following.parts
            return add_gated_norm_modulate(
                x_BSD, own.gate, update_BSD, then.shift, then.scale, into
            )
        x_BSD = self.add(x_BSD, update_BSD)
        return x_BSD, following.norm(x_BSD, into)

    def _each(self, work: Callable[..., Tensor], *streams: Tensor) -> Tensor:
        if len(self.parts) == 1:
            return work(self.parts[0], *streams)
        pieces = zip(*(stream.split(self.lengths, dim=1) for stream in streams), strict=True)
        return torch.cat(
            [work(part, *piece) for part, piece in zip(self.parts, pieces, strict=True)], dim=1
        )


class QwenTimestepEmbedding(nn.Module):
    """A vector for the time; checkpoint name ``timestep_embedder``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.timestep_embedder = EmbeddingMLP(SINUSOID_CHANNELS, dim)

    def forward(self, time_B: Tensor) -> Tensor:
        """[B, D], in the dtype of ``time_B``, which lies in 0..1."""
        return self.timestep_embedder(sinusoid(time_B, scale=TIME_SCALE).to(time_B.dtype))


class QwenModulation(nn.Sequential):
    """Two triples of shift, scale and gate from one linear; checkpoint name ``1`` (0 is a SiLU)."""

    def __init__(self, dim: int) -> None:
        super().__init__(nn.Identity(), nn.Linear(dim, 6 * dim))
        self.width = 6 * dim

    def rows(self, conditioning_BC: Tensor) -> Tensor:
        """All of them, [B, width]."""
        return rows_of(conditioning_BC, self[1], self.width)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, conditioning_BC: Tensor, lengths: tuple[int, ...]
    ) -> tuple[TokenModulation, TokenModulation]:
        """For attention and feed-forward, of a stream with stretches of these ``lengths``.

        ``conditioning_BC`` (`layers.modulation`) holds the rows of one stretch after those of
        another.
        """
        rows = self.rows(conditioning_BC)[:, None].chunk(len(lengths))
        chunks = [row.chunk(6, dim=-1) for row in rows]
        first, second = (
            tuple(AdaLN(*chunk[start : start + 3]) for chunk in chunks) for start in (0, 3)
        )
        return TokenModulation(first, lengths), TokenModulation(second, lengths)


class QwenJointAttention(nn.Module):
    """Attention over text and pictures together; each stream has its own projections."""

    shared_input = (("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"))

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.norm_q = nn.RMSNorm(head_dim, eps=NORM_EPS)
        self.norm_k = nn.RMSNorm(head_dim, eps=NORM_EPS)
        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(dim, dim)
        self.to_v = nn.Linear(dim, dim)
        self.add_k_proj = nn.Linear(dim, dim)
        self.add_v_proj = nn.Linear(dim, dim)
        self.add_q_proj = nn.Linear(dim, dim)
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])
        self.to_add_out = nn.Linear(dim, dim)
        self.norm_added_q = nn.RMSNorm(head_dim, eps=NORM_EPS)
        self.norm_added_k = nn.RMSNorm(head_dim, eps=NORM_EPS)
        self.attend = USPAttention()

    def forward(
        self, image_BND: Tensor, text_BTD: Tensor, rotary: Rotary, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Of image and text; ``mask`` as `USPAttention` takes it."""
        text_qkv, image_qkv = joint_parallel_linears(
            (text_BTD, (self.add_q_proj, self.add_k_proj, self.add_v_proj)),
            (image_BND, (self.to_q, self.to_k, self.to_v)),
        )
        streams = (
            self._heads(text_qkv, self.norm_added_q, self.norm_added_k),
            self._heads(image_qkv, self.norm_q, self.norm_k),
        )
        out_BSD = self.attend.joint(streams, rotary, mask).flatten(2)
        text_length = text_BTD.shape[1]
        text_out, image_out = out_BSD[:, :text_length], out_BSD[:, text_length:]
        return self.to_out[0](image_out), self.to_add_out(text_out)

    def _heads(self, qkv: tuple[Tensor, ...], norm_q: nn.RMSNorm, norm_k: nn.RMSNorm) -> HeadStream:
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in qkv)
        return HeadStream(q, k, v, norm_q, norm_k)


class QwenImageTransformerBlock(nn.Module):
    """Text and pictures have their own weights and meet in attention."""

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.img_mod = QwenModulation(dim)
        self.attn = QwenJointAttention(dim, head_dim)
        self.img_mlp = FeedForward(dim)
        self.txt_mod = QwenModulation(dim)
        self.txt_mlp = FeedForward(dim)

    @property
    def modulations(self) -> tuple[QwenModulation, ...]:
        """Of the pictures, then of the text."""
        return self.img_mod, self.txt_mod

    def forward(
        self,
        image_BND: Tensor,
        text_BTD: Tensor,
        conditioning_BC: Tensor,
        lengths: tuple[int, ...],
        rotary: Rotary,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """One block on both streams; the image's stretches have these ``lengths``."""
        image_share, text_share = shares(conditioning_BC, [m.width for m in self.modulations])
        image_attn, image_mlp = self.img_mod(image_share, lengths)
        text_attn, text_mlp = self.txt_mod(text_share[: len(text_BTD)], (text_BTD.shape[1],))

        # Joint attention.
        image_out, text_out = self.attn(
            image_attn.norm(image_BND, into=self.attn.to_q),
            text_attn.norm(text_BTD, into=self.attn.add_q_proj),
            rotary,
            mask,
        )
        image_BND, image_normed = image_attn.add_then_norm(
            image_BND, image_out, image_mlp, into=self.img_mlp.up
        )
        text_BTD, text_normed = text_attn.add_then_norm(
            text_BTD, text_out, text_mlp, into=self.txt_mlp.up
        )

        # Feed-forward.
        image_BND = image_mlp.add(image_BND, self.img_mlp(image_normed))
        text_BTD = text_mlp.add(text_BTD, self.txt_mlp(text_normed))
        return within_fp16(image_BND), within_fp16(text_BTD)


class QwenImageTransformer2DModel(nn.Module, LayerwiseOffloadableModuleMixin):
    """The denoiser: predicts the flow's velocity at each packed latent token.

    Arguments are those of the checkpoint's ``config.json``. ``zero_cond_t``: reference pictures
    are modulated as at time 0, where there is no noise. ``pooled_projection_dim`` is stored by the
    first checkpoints, and no part of the network has it.

    Raises:
        ValueError: the arguments do not fit together, or ask for what no published text-to-image
            or editing checkpoint has (``guidance_embeds``, and the two of the layered variant).
    """

    lora_names = LORA_NAMES
    layer_names = ["transformer_blocks"]
    graph_safe = True

    def __init__(
        self,
        patch_size: int = 2,
        in_channels: int = 64,
        out_channels: int | None = 16,
        num_layers: int = 60,
        attention_head_dim: int = 128,
        num_attention_heads: int = 24,
        joint_attention_dim: int = 3584,
        guidance_embeds: bool = False,
        axes_dims_rope: Sequence[int] = (16, 56, 56),
        zero_cond_t: bool = False,
        use_additional_t_cond: bool = False,
        use_layer3d_rope: bool = False,
        pooled_projection_dim: int | None = None,
    ) -> None:
        super().__init__()
        check_axes(axes_dims_rope, attention_head_dim)
        for name, given in (
            ("guidance_embeds", guidance_embeds),
            ("use_additional_t_cond", use_additional_t_cond),
            ("use_layer3d_rope", use_layer3d_rope),
        ):
            if given:
                raise ValueError(f"{name}=true is another network than this one; it is not served")
        dim = num_attention_heads * attention_head_dim
        out_channels = in_channels if out_channels is None else out_channels
        self.num_attention_heads = num_attention_heads
        self.axes_dims_rope = tuple(axes_dims_rope)
        self.zero_cond_t = zero_cond_t
        self.time_text_embed = QwenTimestepEmbedding(dim)
        self.txt_norm = nn.RMSNorm(joint_attention_dim, eps=NORM_EPS)
        self.img_in = nn.Linear(in_channels, dim)
        self.txt_in = nn.Linear(joint_attention_dim, dim)
        self.transformer_blocks = nn.ModuleList(
            QwenImageTransformerBlock(dim, attention_head_dim) for _ in range(num_layers)
        )
        self.norm_out = AdaLayerNormContinuous(dim, dim)
        self.proj_out = nn.Linear(dim, patch_size * patch_size * out_channels)
        self.modulation_widths = tuple(sum(m.width for m in ms) for ms in self._modulations())

    def rotary_embedding(
        self, text_length: int, image: Grid, references: Sequence[Grid] = ()
    ) -> PictureRotary:
        """Angles of the picture to make, of references, and of the text.

        Picture k stands at frame k, its rows and columns counted from its middle; the text goes on
        behind the largest of them along the diagonal of all three axes.
        """
        device = self.img_in.weight.device
        grids = [image, *references]
        start = max(max(height // 2, width // 2) for height, width in grids)
        text = torch.arange(start, start + text_length, device=device)
        pictures = [centred_positions(grid, frame, device) for frame, grid in enumerate(grids)]
        others = torch.cat([torch.empty(0, POSITION_AXES, device=device), *pictures[1:]])
        positions = (text[:, None].expand(-1, POSITION_AXES), pictures[0], others)
        return PictureRotary(
            *(axial_rotary(ids, self.axes_dims_rope, ROPE_THETA) for ids in positions)
        )

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        timestep: Tensor | None = None,
        *,
        rotary: PictureRotary,
        modulation: Tensor | None = None,
    ) -> Tensor:
        """Velocity at the tokens of the picture to make, [B, N, out_channels].

        ``hidden_states`` [B, N + R, in_channels], ``encoder_hidden_states`` [B, T, text width],
        ``encoder_hidden_states_mask`` boolean [B, T], True = a token; None where all are,
        ``timestep`` [B] in 0..1, ``rotary`` from :meth:`rotary_embedding`, ``modulation`` from
        :meth:`modulation_rows`, which stands for all that depends on time.
        """
        assert timestep is not None
        image_BND = self.img_in(hidden_states)
        text_BTD = self.txt_in(self.txt_norm(encoder_hidden_states))
        image_length, reference_length = len(rotary.image.cos), len(rotary.reference.cos)
        lengths, time_B = (image_BND.shape[1],), timestep.to(image_BND.dtype)
        if self.zero_cond_t and reference_length:
            lengths, time_B = (image_length, reference_length), torch.cat((time_B, time_B * 0))
        conditioning_BC = modulation
        if conditioning_BC is None:
            conditioning_BC = self._silu_temb(time_B)
        *of_blocks, last = shares(conditioning_BC, self.modulation_widths)
        mask = _key_mask(encoder_hidden_states_mask, image_BND.shape[1])
        joint_rotary = rotary.joined()

        for block, share in zip(self.transformer_blocks, of_blocks, strict=True):
            image_BND, text_BTD = block(image_BND, text_BTD, share, lengths, joint_rotary, mask)

        image_BND = image_BND[:, :image_length]
        return self.proj_out(self.norm_out(image_BND, last[: len(image_BND)]))

    def modulation_rows(self, timestep: Tensor) -> Tensor | None:
        """What modulates every block and the last norm, end to end, [B, widths of all].

        None with ``zero_cond_t``: reference pictures have rows of their own there.
        """
        if self.zero_cond_t:
            return None
        silu_temb_BD = self._silu_temb(timestep.to(self.txt_norm.weight.dtype))
        mods = chain.from_iterable(self._modulations())
        return torch.cat([mod.rows(silu_temb_BD) for mod in mods], dim=-1)

    def _modulations(self) -> list[tuple[QwenModulation | AdaLayerNormContinuous, ...]]:
        """What modulates each block, and the last norm: the order of rows that lie end to end."""
        return [*(block.modulations for block in self.transformer_blocks), (self.norm_out,)]  # pyright: ignore[reportReturnType] (a ModuleList forgets its type)

    def _silu_temb(self, time_B: Tensor) -> Tensor:
        return F.silu(in_full_company(self.time_text_embed, time_B))


def check_axes(axes_dims_rope: Sequence[int], head_dim: int) -> None:
    """Raise ValueError unless the rotary axes share out a head's channels."""
    if (
        len(axes_dims_rope) != POSITION_AXES
        or sum(axes_dims_rope) != head_dim
        or any(dim <= 0 or dim % 2 for dim in axes_dims_rope)
    ):
        raise ValueError(
            f"axes_dims_rope={tuple(axes_dims_rope)} must be {POSITION_AXES} even numbers that add "
            f"up to attention_head_dim={head_dim}"
        )


def centred_positions(grid: Grid, frame: int, device: torch.device) -> Tensor:
    """Positions [h * w, 3] of a picture; of an odd count, one more lies before the middle."""
    height, width = grid
    ids = torch.full((height, width, POSITION_AXES), frame, device=device)
    ids[..., 1] = torch.arange(height, device=device)[:, None] - (height - height // 2)
    ids[..., 2] = torch.arange(width, device=device) - (width - width // 2)
    return ids.flatten(0, 1)


def _key_mask(text_mask_BT: Tensor | None, image_length: int) -> Tensor | None:
    """Which keys of the joint sequence are seen, [B, 1, 1, S]."""
    if text_mask_BT is None:
        return None
    seen = F.pad(text_mask_BT.bool(), (0, image_length), value=True)
    return seen[:, None, None, :]


def within_fp16(x: Tensor) -> Tensor:
    """float16 overflows to infinity in late blocks: the reference clips there, and only there."""
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


# Of 20.4 B parameters 0.2% stay whole: the embedders of image, text and time, the last norm and
# projection, and the norms of a head.
TP_PLAN = {
    "*.attn.to_[qkv]": Column(heads="num_attention_heads"),
    "*.attn.add_[qkv]_proj": Column(heads="num_attention_heads"),
    "*.attn.to_out.0": Row(),
    "*.attn.to_add_out": Row(),
    "*_mlp.net.0.proj": Column(),
    "*_mlp.net.2": Row(),
    # 6.8 B parameters in linears that run once a step: gathered, in the order of the chunks.
    "*_mod.1": Column(gather_output=True),
}

SP_PLAN = SequencePlan(
    streams=("text", "image", "reference"),
    edges=(
        Split("rotary", "text", dim=0, item=0),
        Split("rotary", "image", dim=0, item=1),
        Split("rotary", "reference", dim=0, item=2),
        Split("encoder_hidden_states", "text", dim=1),
        Split("encoder_hidden_states_mask", "text", dim=1),
        Split("hidden_states", ("image", "reference"), dim=1),
        Gather(RETURN, "image", dim=1),
    ),
)

STEP_CACHE = StepCachePlan(
    blocks=(
        CachedBlocks(
            "transformer_blocks",
            carries=("image_BND", "text_BTD"),
            per_image=("conditioning_BC", "mask"),
        ),
    ),
    streams=("image", "reference"),
)

STEP_TABLE = StepTable(argument="modulation", method="modulation_rows")

EntryClass = QwenImageTransformer2DModel
