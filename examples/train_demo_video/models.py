"""The miniature's three networks: their sizes, how they start, and how they work together.

Legend: B clips, T text tokens, D width of the text's states, C latent channels, F latent frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor, nn
from transformers import UMT5Config, UMT5EncoderModel

from examples.train_demo_video.tracks import CANVAS, FRAMES
from sglang.multimodal_gen.runtime.layers.rotary_embedding import Rotary
from sglang.multimodal_gen.runtime.models.dits.wan import WanTransformer3DModel

LATENT_CHANNELS = 16
LATENT_FRAMES = (FRAMES - 1) // 4 + 1
LATENT_SIDE = CANVAS // 8
LATENT_SHAPE = (LATENT_CHANNELS, LATENT_FRAMES, LATENT_SIDE, LATENT_SIDE)
TEXT_LENGTH = 24
"""Longest prompt in tokens, its end token included (``max_sequence_length``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Widths and depths of the networks."""

    vae_width: int = 16
    heads: int = 5
    head_dim: int = 32
    blocks: int = 8
    time_channels: int = 64
    text_width: int = 128
    text_layers: int = 4


FULL = Sizes()
TOY = Sizes(vae_width=4, heads=2, head_dim=12, blocks=1, text_width=32, text_layers=1)


def transformer_config(sizes: Sizes) -> dict[str, Any]:
    """Constructor arguments of the denoiser, as its config.json holds them."""
    return {
        "patch_size": [1, 2, 2],
        "num_attention_heads": sizes.heads,
        "attention_head_dim": sizes.head_dim,
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "text_dim": sizes.text_width,
        "freq_dim": sizes.time_channels,
        "ffn_dim": 4 * sizes.heads * sizes.head_dim,
        "num_layers": sizes.blocks,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "rope_max_seq_len": 64,
    }


def build_vae(sizes: Sizes) -> AutoencoderKLWan:
    """Wan 2.1's causal autoencoder, narrow: 8x in space, 4x in time, 16 channels."""
    config: dict[str, Any] = {
        "base_dim": sizes.vae_width,
        "z_dim": LATENT_CHANNELS,
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": 1,
        "attn_scales": [],
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.0] * LATENT_CHANNELS,
        "latents_std": [1.0] * LATENT_CHANNELS,
    }
    return AutoencoderKLWan(**config)


class DemoVideoModel(nn.Module):
    """The text encoder and the denoiser, which are trained together.

    Child names are those of the folders of a Wan checkpoint.
    """

    def __init__(self, sizes: Sizes, vocabulary: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.text_encoder = UMT5EncoderModel(
            UMT5Config(
                vocab_size=vocabulary,
                d_model=sizes.text_width,
                d_kv=32,
                d_ff=2 * sizes.text_width,
                num_layers=sizes.text_layers,
                num_heads=sizes.text_width // 32,
                feed_forward_proj="gated-gelu",
                dropout_rate=0.0,
                use_cache=False,
            )
        )
        self.transformer = WanTransformer3DModel(**transformer_config(sizes))
        self._rotary: dict[torch.device, Rotary] = {}
        _start_as_identity(self.transformer)

    def encode(self, ids_BT: Tensor) -> Tensor:
        """States [B, T, D] of padded token ids (0), zero where there is no token, as Wan's."""
        there_BT = ids_BT != 0
        # Four axes: Transformers takes the mask as it is, and never makes the host wait for it.
        dtype = self.text_encoder.dtype
        mask = torch.zeros(there_BT.shape, dtype=dtype, device=ids_BT.device)
        mask = mask.masked_fill(~there_BT, torch.finfo(dtype).min)[:, None, None]
        states = self.text_encoder(input_ids=ids_BT, attention_mask=mask).last_hidden_state
        return states * there_BT[..., None]

    def denoise(self, latents_BCFHW: Tensor, text_BTD: Tensor, time_B: Tensor) -> Tensor:
        """Velocity (noise minus data) of normalised latents at times in 0..1."""
        device = latents_BCFHW.device
        if device not in self._rotary:  # kept: building it makes the host wait
            self._rotary[device] = self.transformer.rotary_embedding(*LATENT_SHAPE[1:])
        return self.transformer(latents_BCFHW, 1000 * time_B, text_BTD, rotary=self._rotary[device])

    def compile_blocks(self) -> None:
        """Compiles block by block: equal blocks share one compilation."""
        for block in (*self.transformer.blocks, *self.text_encoder.encoder.block):
            block.compile()


def decode(vae: AutoencoderKLWan, latents_BCFHW: Tensor) -> Tensor:
    """Clips [B, 3, F, 64, 64] in about -1..1 of normalised latents."""
    mean, std = _moments(vae, latents_BCFHW)
    return decoded(vae, (latents_BCFHW * std + mean).to(vae.dtype))


def decoded(vae: AutoencoderKLWan, latents_BCFHW: Tensor) -> Tensor:
    """The decoder's clip, not clamped; Diffusers types loosely, and this is where that ends."""
    decoder: Any = vae
    return decoder.decode(latents_BCFHW).sample


def posterior(vae: AutoencoderKLWan, clips: Tensor) -> DiagonalGaussianDistribution:
    """The encoder's distribution of latents, not normalised."""
    output: Any = vae.encode(clips)
    return output.latent_dist


def encode_clips(vae: AutoencoderKLWan, clips: Tensor) -> Tensor:
    """Normalised latents [B, C, F, h, w] of clips: the posterior's mean."""
    latents = posterior(vae, clips.to(vae.dtype)).mean
    mean, std = _moments(vae, latents)
    return (latents - mean) / std


def move(module: nn.Module, device: torch.device | str, dtype: torch.dtype | None = None) -> None:
    """Moves in place; Diffusers' own ``to`` is typed as no method."""
    module.to(device, dtype)


def _moments(vae: AutoencoderKLWan, like: Tensor) -> tuple[Tensor, Tensor]:
    names = ("latents_mean", "latents_std")
    mean, std = (like.new_tensor(vae.config[name]).view(1, -1, 1, 1, 1) for name in names)
    return mean, std


@torch.no_grad()
def _start_as_identity(transformer: WanTransformer3DModel) -> None:
    """Gates and the output start at zero (adaLN-Zero), all else as Wan's authors begin."""
    for module in transformer.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    nn.init.xavier_uniform_(transformer.patch_embedding.weight.flatten(1))
    embedder = transformer.condition_embedder
    for layer in (
        embedder.time_embedder.linear_1,
        embedder.time_embedder.linear_2,
        embedder.text_embedder.linear_1,
        embedder.text_embedder.linear_2,
    ):
        nn.init.normal_(layer.weight, std=0.02)
    nn.init.zeros_(embedder.time_proj.weight)
    nn.init.zeros_(transformer.proj_out.weight)
