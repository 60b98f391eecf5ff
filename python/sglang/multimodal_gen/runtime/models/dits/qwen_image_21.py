"""Qwen-Image 2.1: a rectified-flow transformer of single-stream blocks that reads text causally.

Reference class and checkpoint names: Diffusers' ``QwenImage21Transformer2DModel``.

Text and reference pictures see only what stands before them and are modulated as at time 0, so
nothing of them depends on the picture to make or on its time: their keys and values are computed
once a request, and a step computes the picture's own tokens alone.

Legend: B batch, P tokens of the prefix (text and references in it), N tokens of the picture to
make, S either of them, T tokens of text, D model width, H heads, d head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from sglang.multimodal_gen.runtime.layers.attention.usp import USPAttention
from sglang.multimodal_gen.runtime.layers.embeddings import (
    SINUSOID_CHANNELS,
    EmbeddingMLP,
    sinusoid,
)
from sglang.multimodal_gen.runtime.layers.ops.norm_modulate import (
    EPS,
    add_gated,
    add_gated_norm_modulate,
    norm_modulate,
)
from sglang.multimodal_gen.runtime.layers.products import parallel_linears
from sglang.multimodal_gen.runtime.layers.qk_norm import HeadStream, norm_rotate_join
from sglang.multimodal_gen.runtime.layers.rotary_embedding import Rotary, axial_rotary
from sglang.multimodal_gen.runtime.layers.sequence_plan import (
    RETURN,
    Gather,
    SequencePlan,
    Split,
)
from sglang.multimodal_gen.runtime.layers.tensor_parallel import Column, Row
from sglang.multimodal_gen.runtime.memory.layerwise import LayerwiseOffloadableModuleMixin
from sglang.multimodal_gen.runtime.models.dits.qwen_image import (
    LORA_NAMES,
    ROPE_THETA,
    TIME_SCALE,
    Grid,
    centred_positions,
    check_axes,
    within_fp16,
)
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

PICTURE_TOKENS = 4
"""Latent tokens in the place of one token that the language model has for a reference picture."""

KeysValues = tuple[Tensor, Tensor]
"""Of one block, each [B, S, H, d], normed and rotated."""


Slot = tuple[int, int]
"""First token of a reference picture among a text's embeddings, and how many it has there."""


class Prefix(NamedTuple):
    """What the picture to make sees before itself; ``mask`` is None where no text is padded."""

    blocks: tuple[KeysValues, ...]
    mask: Tensor | None

    def rows(self, rows: Sequence[int]) -> Prefix:
        """A batch of these rows, which may come several times."""
        chosen = list(rows)
        blocks = tuple((keys[chosen], values[chosen]) for keys, values in self.blocks)
        return Prefix(blocks, None if self.mask is None else self.mask[chosen])


class Segment(NamedTuple):
    """A stretch of the prefix: text, with the causal ``mask`` of its keys, or one picture."""

    start: int
    end: int
    mask: Tensor | None


class Past(NamedTuple):
    """What stands before a block's tokens, and the keys among all that are seen, [B, 1, 1, T]."""

    keys: Tensor
    values: Tensor
    mask: Tensor | None


Context = Past | tuple[Segment, ...]
"""What tokens attend to, besides themselves: a past, or in a prefix each segment those before."""


class Modulation(NamedTuple):
    """What modulates every block of the network alike, each [B, 1, D]; gates are bounded."""

    attn_scale: Tensor
    attn_gate: Tensor
    mlp_scale: Tensor
    mlp_gate: Tensor
    no_shift: Tensor


class ZeroCentredRMSNorm(nn.Module):
    """An RMS norm in float32 whose checkpoint stores its scale less 1."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        wide = F.rms_norm(x.float(), x.shape[-1:], self.weight.float() + 1, EPS)
        return wide.to(x.dtype)


class TextProjection(nn.Module):
    """From the language model's width to this network's."""

    def __init__(self, text_dim: int, dim: int) -> None:
        super().__init__()
        self.text_norm = ZeroCentredRMSNorm(text_dim)
        self.in_layer = nn.Linear(text_dim, dim, bias=False)
        self.out_layer = nn.Linear(dim, dim, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """[B, T, text width] -> [B, T, D]."""
        hidden = F.gelu(self.in_layer(self.text_norm(text)), approximate="tanh")
        return self.out_layer(hidden)


class TimestepEmbedding(nn.Module):
    """A vector for the time; checkpoint name ``timestep_embedder``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.timestep_embedder = EmbeddingMLP(SINUSOID_CHANNELS, dim, bias=False)

    def forward(self, time_B: Tensor) -> Tensor:
        """[B, D], in the dtype of ``time_B``, which lies in 0..1."""
        return self.timestep_embedder(sinusoid(TIME_SCALE * time_B.float()).to(time_B.dtype))


class SharedModulation(nn.Sequential):
    """Scales and gates of all blocks from one linear; checkpoint name ``1`` (0 is a SiLU)."""

    def __init__(self, dim: int) -> None:
        super().__init__(nn.Identity(), nn.Linear(dim, 4 * dim, bias=False))

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, silu_temb_BD: Tensor
    ) -> Modulation:
        """For attention, then for feed-forward."""
        scale, gate, mlp_scale, mlp_gate = self[1](silu_temb_BD)[:, None].chunk(4, dim=-1)
        zero = torch.zeros_like(silu_temb_BD)[:, None]
        return Modulation(scale, gate.tanh(), mlp_scale, mlp_gate.tanh(), zero)


class ScaledNorm(nn.Module):
    """The last norm: scaled by the time, and not shifted."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim, bias=False)

    def forward(self, x_BSD: Tensor, silu_temb_BD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        scale = self.linear(silu_temb_BD)[:, None]
        return norm_modulate(x_BSD, torch.zeros_like(scale), scale)


class SwiGLU(nn.Module):
    """``out(silu(gate_layer(x)) * proj(x))``."""

    shared_input = (("gate_layer", "proj"),)

    def __init__(self, dim: int, inner_dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, inner_dim, bias=False)
        self.out = nn.Linear(inner_dim, dim, bias=False)
        self.gate_layer = nn.Linear(dim, inner_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        gate, value = parallel_linears(x, self.gate_layer, self.proj)
        return self.out(F.silu(gate) * value)


class QwenImage21Attention(nn.Module):
    """Attention to a past and oneself, or within a prefix."""

    shared_input = (("to_q", "to_k", "to_v"),)

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(dim, dim, bias=False)])
        self.norm_q = nn.RMSNorm(head_dim, eps=EPS)
        self.norm_k = nn.RMSNorm(head_dim, eps=EPS)
        self.attend = USPAttention()
        # Every rank reads the whole prefix: once a request, against a step's many times.
        self.attend_in_prefix = USPAttention(replicated_keys=True)

    def forward(self, x_BSD: Tensor, rotary: Rotary, context: Context) -> tuple[Tensor, KeysValues]:
        """The result, and the keys and values of these tokens."""
        linears = parallel_linears(x_BSD, self.to_q, self.to_k, self.to_v)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in linears)
        q, k, v = norm_rotate_join((HeadStream(q, k, v, self.norm_q, self.norm_k),), rotary)
        if isinstance(context, Past):
            keys, values = torch.cat((context.keys, k), 1), torch.cat((context.values, v), 1)
            out = self.attend(q, keys, values, context.mask)
        else:
            parts = [
                self.attend_in_prefix(q[:, start:end], k[:, :end], v[:, :end], mask)
                for start, end, mask in context
            ]
            out = torch.cat(parts, dim=1)
        return self.to_out[0](out.flatten(2)), (k, v)


class QwenImage21TransformerBlock(nn.Module):
    """Attention and feed-forward; text and pictures have the same weights."""

    def __init__(self, dim: int, head_dim: int, mlp_ratio: int) -> None:
        super().__init__()
        self.attn = QwenImage21Attention(dim, head_dim)
        self.img_mlp = SwiGLU(dim, mlp_ratio * dim)

    def forward(
        self, x_BSD: Tensor, modulation: Modulation, rotary: Rotary, context: Context
    ) -> tuple[Tensor, KeysValues]:
        """One block, and the keys and values that later tokens will see of these."""
        zero = modulation.no_shift
        normed = norm_modulate(x_BSD, zero, modulation.attn_scale)
        out, seen = self.attn(normed, rotary, context)
        x_BSD, normed = add_gated_norm_modulate(
            x_BSD, modulation.attn_gate, out, zero, modulation.mlp_scale
        )
        x_BSD = add_gated(x_BSD, modulation.mlp_gate, self.img_mlp(normed))
        return within_fp16(x_BSD), seen


class QwenImage21Transformer2DModel(nn.Module, LayerwiseOffloadableModuleMixin):
    """The denoiser: predicts the flow's velocity at each latent pixel, which is a token.

    Arguments are those of the checkpoint's ``config.json``.

    Raises:
        ValueError: they do not fit together, or ask for what no published checkpoint has.
    """

    lora_names = LORA_NAMES
    layer_names = ["transformer_blocks"]
    graph_safe = True

    def __init__(
        self,
        patch_size: int = 1,
        in_channels: int = 64,
        out_channels: int | None = 64,
        num_layers: int = 32,
        attention_head_dim: int = 128,
        num_attention_heads: int = 32,
        context_in_dim: int = 4096,
        mlp_ratio: int = 3,
        axes_dims_rope: Sequence[int] = (16, 56, 56),
        eps: float = EPS,
        causal_condition: bool = True,
    ) -> None:
        super().__init__()
        check_axes(axes_dims_rope, attention_head_dim)
        for name, given, served in (
            ("patch_size", patch_size, 1),
            ("eps", eps, EPS),
            ("causal_condition", causal_condition, True),
        ):
            if given != served:
                raise ValueError(f"{name}={given} is another network than this one ({served})")
        dim = num_attention_heads * attention_head_dim
        self.num_attention_heads = num_attention_heads
        self.axes_dims_rope = tuple(axes_dims_rope)
        self.time_text_embed = TimestepEmbedding(dim)
        self.txt_in = TextProjection(context_in_dim, dim)
        self.img_in = nn.Linear(in_channels, dim, bias=False)
        self.modulation = SharedModulation(dim)
        self.transformer_blocks = nn.ModuleList(
            QwenImage21TransformerBlock(dim, attention_head_dim, mlp_ratio)
            for _ in range(num_layers)
        )
        self.norm_out = ScaledNorm(dim)
        out_channels = in_channels if out_channels is None else out_channels
        self.proj_out = nn.Linear(dim, out_channels, bias=False)

    def rotary_embedding(self, image: Grid) -> Rotary:
        """Angles of the picture to make: it stands at frame 0, and what it sees before that."""
        return self._angles(centred_positions(image, 0, self.img_in.weight.device))

    def prefix(
        self,
        texts: Sequence[Tensor],
        references_1RC: Tensor | None = None,
        slots: Sequence[Slot] = (),
        grids: Sequence[Grid] = (),
    ) -> Prefix:
        """What the picture sees of each text [T, text width], with the reference pictures in it.

        Args:
            texts: one for each row of the batch, without padding.
            references_1RC: latents of all references, end to end.
            slots: where each of them stands in the texts.
            grids: its height and width in tokens.

        Raises:
            CheckpointError: the language model sees a picture at another size than the VAE.
        """
        for (_, tokens), (height, width) in zip(slots, grids, strict=True):
            if tokens * PICTURE_TOKENS != height * width:
                raise CheckpointError(
                    f"the checkpoint's picture processor makes {tokens} tokens of a picture of "
                    f"{height} x {width} latents, which takes {height * width / PICTURE_TOKENS:g}: "
                    "its patches, or its most and least pixels, are another model's"
                )
        each = [self._prefix_of(text, references_1RC, slots, grids) for text in texts]
        lengths = [blocks[0][0].shape[1] for blocks in each]
        blocks = tuple(
            (_padded([keys for keys, _ in same]), _padded([values for _, values in same]))
            for same in zip(*each, strict=True)
        )
        if len(set(lengths)) == 1:
            return Prefix(blocks, None)
        device = texts[0].device
        ends = torch.tensor(lengths, device=device)[:, None]
        return Prefix(blocks, torch.arange(max(lengths), device=device) < ends)

    def forward(
        self, hidden_states: Tensor, timestep: Tensor, *, prefix: Prefix, rotary: Rotary
    ) -> Tensor:
        """Velocity at the tokens of the picture to make, [B, N, out_channels].

        ``hidden_states`` [B, N, in_channels], ``timestep`` [B] in 0..1, ``prefix`` from
        :meth:`prefix`, ``rotary`` from :meth:`rotary_embedding`.
        """
        x_BND = self.img_in(hidden_states)
        silu_temb_BD = F.silu(self.time_text_embed(timestep.to(x_BND.dtype)))
        modulation = self.modulation(silu_temb_BD)
        mask = _key_mask(prefix.mask, x_BND.shape[1])

        for block, (keys, values) in zip(self.transformer_blocks, prefix.blocks, strict=True):
            x_BND, _ = block(x_BND, modulation, rotary, Past(keys, values, mask))

        return self.proj_out(self.norm_out(x_BND, silu_temb_BD))

    def _prefix_of(
        self,
        text_TD: Tensor,
        references_1RC: Tensor | None,
        slots: Sequence[Slot],
        grids: Sequence[Grid],
    ) -> list[KeysValues]:
        """Keys and values [1, P, H, d] of every block, for one text."""
        x_1TD = self.txt_in(text_TD[None])
        device, sizes = x_1TD.device, [height * width for height, width in grids]
        pictures = iter(())
        if references_1RC is not None:
            pictures = iter(self.img_in(references_1RC).split(sizes, dim=1))
        parts, ids, segments, start, at = [], [], [], 0, 0
        for first, last, grid in _stretches(len(text_TD), slots, grids):
            if grid is None:
                part, length = x_1TD[:, first:last], last - first
                positions = torch.arange(at, at + length, device=device)
                ids.append(positions[:, None].expand(-1, len(self.axes_dims_rope)))
                mask = torch.ones(length, start + length, dtype=torch.bool, device=device)
                mask, at = mask.tril(start)[None, None], at + length
            else:
                part, mask = next(pictures), None
                ids.append(centred_positions(grid, at, device))
                at += max(grid)
            parts.append(part)
            segments.append(Segment(start, start + part.shape[1], mask))
            start = segments[-1].end

        # Only distances between frames count: with the picture to make at frame 0, its angles do
        # not depend on the text, nor a row of a batch on the texts of others.
        positions = torch.cat(ids)
        positions[:, 0] -= at
        modulation = self.modulation(F.silu(self.time_text_embed(x_1TD.new_zeros(1))))
        x_1PD, rotary, seen = torch.cat(parts, dim=1), self._angles(positions), []
        for block in self.transformer_blocks:
            x_1PD, keys_values = block(x_1PD, modulation, rotary, tuple(segments))
            seen.append(keys_values)
        return seen

    def _angles(self, positions: Tensor) -> Rotary:
        return axial_rotary(positions, self.axes_dims_rope, ROPE_THETA)


def _padded(rows: Sequence[Tensor]) -> Tensor:
    """Rows [1, P, H, d] as one batch, zeros behind those that are shorter; memory of its own."""
    return pad_sequence([row[0] for row in rows], batch_first=True)


def _stretches(
    length: int, slots: Sequence[Slot], grids: Sequence[Grid]
) -> Iterator[tuple[int, int, Grid | None]]:
    """A text's embeddings in order: first, last, and the grid where they stand for a picture."""
    done = 0
    for (first, tokens), grid in zip(slots, grids, strict=True):
        if first > done:
            yield done, first, None
        done = first + tokens
        yield first, done, grid
    if length > done:
        yield done, length, None


def _key_mask(prefix_mask_BP: Tensor | None, length: int) -> Tensor | None:
    """Which keys of prefix and picture are seen, [B, 1, 1, P + N]."""
    if prefix_mask_BP is None:
        return None
    return F.pad(prefix_mask_BP, (0, length), value=True)[:, None, None, :]


# Of 7.1 B parameters 0.5% stay whole: the embedders of picture and time, the last norm and
# projection, and the norms of a head.
TP_PLAN = {
    "*.attn.to_[qkv]": Column(heads="num_attention_heads"),
    "*.attn.to_out.0": Row(),
    "*.img_mlp.gate_layer": Column(),
    "*.img_mlp.proj": Column(),
    "*.img_mlp.out": Row(),
    "txt_in.in_layer": Column(),
    "txt_in.out_layer": Row(),
    "modulation.1": Column(gather_output=True),
}

# The prefix is computed by every rank, and then held as each rank's piece while a step runs.
SP_PLAN = SequencePlan(
    streams=("prefix", "image"),
    edges=(
        Split("prefix", "prefix", dim=1),
        Split("rotary", "image", dim=0),
        Split("hidden_states", "image", dim=1),
        Gather(RETURN, "image", dim=1),
    ),
)

EntryClass = QwenImage21Transformer2DModel
