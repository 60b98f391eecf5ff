"""The miniature's five networks: their sizes, how they start, and how they work together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from examples.train_demo_model.layout import CANVAS
from examples.train_demo_model.vocabulary import CLIP_LENGTH
from sglang.multimodal_gen.runtime.layers.rotary_embedding import Rotary
from sglang.multimodal_gen.runtime.models.dits.flux import FluxTransformer2DModel

LATENT_CHANNELS = 16
LATENT_SIDE = CANVAS // 8
TOKEN_SIDE = LATENT_SIDE // 2
TOKENS = TOKEN_SIDE**2
TOKEN_CHANNELS = 4 * LATENT_CHANNELS


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Widths and depths of the networks."""

    vae_channels: tuple[int, ...] = (16, 32, 64, 96)
    vae_groups: int = 4
    """Four channels or more to a group: with one, group norm would erase the mean colour."""
    double_blocks: int = 2
    single_blocks: int = 6
    heads: int = 5
    head_dim: int = 32
    rope: tuple[int, int, int] = (8, 12, 12)
    t5_width: int = 128
    t5_layers: int = 4
    clip_width: int = 64
    clip_layers: int = 2


FULL = Sizes()
TOY = Sizes(
    vae_channels=(8, 8, 16, 16),
    vae_groups=2,
    double_blocks=1,
    single_blocks=1,
    heads=2,
    head_dim=16,
    rope=(4, 6, 6),
    t5_width=32,
    t5_layers=1,
    clip_width=32,
    clip_layers=1,
)


def transformer_config(sizes: Sizes) -> dict[str, Any]:
    """Constructor arguments of the DiT, as its config.json holds them."""
    return {
        "patch_size": 1,
        "in_channels": TOKEN_CHANNELS,
        "out_channels": None,
        "num_layers": sizes.double_blocks,
        "num_single_layers": sizes.single_blocks,
        "attention_head_dim": sizes.head_dim,
        "num_attention_heads": sizes.heads,
        "joint_attention_dim": sizes.t5_width,
        "pooled_projection_dim": sizes.clip_width,
        "guidance_embeds": False,
        "axes_dims_rope": list(sizes.rope),
    }


def build_vae(sizes: Sizes) -> AutoencoderKL:
    """The autoencoder: 8x, 16 channels, without quantisation convolutions, as FLUX's."""
    config: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": sizes.vae_channels,
        "layers_per_block": 1,
        "latent_channels": LATENT_CHANNELS,
        "norm_num_groups": sizes.vae_groups,
        "sample_size": CANVAS,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "scaling_factor": 1.0,
        "shift_factor": 0.0,
    }
    return AutoencoderKL(**config)


class DemoModel(nn.Module):
    """The text encoders and the DiT, which are trained together.

    Child names are those of the folders of a FLUX checkpoint.
    """

    def __init__(self, sizes: Sizes, clip_vocabulary: int, t5_vocabulary: int) -> None:
        super().__init__()
        self.sizes = sizes
        self._rotary: dict[tuple[int, torch.device], Rotary] = {}
        end = clip_vocabulary - 1
        self.text_encoder = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=clip_vocabulary,
                hidden_size=sizes.clip_width,
                intermediate_size=4 * sizes.clip_width,
                projection_dim=sizes.clip_width,
                num_hidden_layers=sizes.clip_layers,
                num_attention_heads=sizes.clip_width // 32,
                max_position_embeddings=CLIP_LENGTH,
                bos_token_id=end - 1,
                eos_token_id=end,
                pad_token_id=end,
            )
        )
        self.text_encoder_2 = T5EncoderModel(
            T5Config(
                vocab_size=t5_vocabulary,
                d_model=sizes.t5_width,
                d_kv=32,
                d_ff=2 * sizes.t5_width,
                num_layers=sizes.t5_layers,
                num_heads=sizes.t5_width // 32,
                feed_forward_proj="gated-gelu",
                dropout_rate=0.0,
                use_cache=False,
            )
        )
        self.transformer = FluxTransformer2DModel(**transformer_config(sizes))
        _start_as_identity(self.transformer)

    def encode(self, t5_ids_BT: Tensor, clip_ids_BL: Tensor) -> tuple[Tensor, Tensor]:
        """T5 states [B, T, D] and CLIP's pooled output [B, P]; no mask, as FLUX."""
        states = self.text_encoder_2(input_ids=t5_ids_BT).last_hidden_state
        return states, self.text_encoder(input_ids=clip_ids_BL).pooler_output

    def denoise(self, latents_BND: Tensor, text: tuple[Tensor, Tensor], time_B: Tensor) -> Tensor:
        """Velocity (noise minus data) of packed latents [B, N, 64] at times in 0..1."""
        rotary = self._rotary_of(text[0].shape[1], latents_BND.device)
        return self.transformer(latents_BND, text[0], text[1], time_B, rotary=rotary)

    def _rotary_of(self, text_length: int, device: torch.device) -> Rotary:
        """Kept, since building it copies from the host and would make each step wait."""
        key = (text_length, device)
        if key not in self._rotary:
            self._rotary[key] = self.transformer.rotary_embedding(
                text_length, TOKEN_SIDE, TOKEN_SIDE
            )
        return self._rotary[key]

    def forward(
        self, latents_BND: Tensor, t5_ids_BT: Tensor, clip_ids_BL: Tensor, time_B: Tensor
    ) -> Tensor:
        """Velocity from token ids; the training path."""
        return self.denoise(latents_BND, self.encode(t5_ids_BT, clip_ids_BL), time_B)

    def compile_blocks(self) -> None:
        """Compiles block by block: equal blocks share one compilation, which saves a minute."""
        for block in (
            *self.transformer.transformer_blocks,
            *self.transformer.single_transformer_blocks,
            *self.text_encoder_2.encoder.block,
        ):
            block.compile()

    def uncompile(self) -> None:
        """Back to eager execution."""
        for module in self.modules():
            module._compiled_call_impl = None


def pack(latents_BCHW: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, H/2 * W/2, 4 C]; a token's channel is ``4 c + 2 dy + dx``."""
    folded = latents_BCHW.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return folded.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack(tokens_BND: Tensor) -> Tensor:
    """The inverse of :func:`pack` for the demo model's size."""
    grid = tokens_BND.unflatten(1, (TOKEN_SIDE, TOKEN_SIDE)).unflatten(3, (LATENT_CHANNELS, 2, 2))
    return grid.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def decode(vae: AutoencoderKL, tokens_BND: Tensor) -> Tensor:
    """Pictures [B, 3, 128, 128] in about -1..1 of packed, normalised latents."""
    scale, shift = vae.config["scaling_factor"], vae.config["shift_factor"]
    return decoded(vae, unpack(tokens_BND).to(vae.dtype) / scale + shift)


def decoded(vae: AutoencoderKL, latents_BCHW: Tensor) -> Tensor:
    """The decoder's picture; Diffusers types its outputs loosely, and this is where that ends."""
    decoder: Any = vae
    return decoder.decode(latents_BCHW).sample


def posterior(vae: AutoencoderKL, image: Tensor) -> DiagonalGaussianDistribution:
    """The encoder's distribution of latents, not normalised."""
    output: Any = vae.encode(image)
    return output.latent_dist


def move(module: nn.Module, device: torch.device | str, dtype: torch.dtype | None = None) -> None:
    """Moves in place; convolutions' weights in the layout that tensor cores like."""
    loose: Any = module.to(device, dtype)  # the stubs know no memory_format alone
    loose.to(memory_format=torch.channels_last)


def count_parameters(module: nn.Module) -> int:
    """Number of parameters, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


@torch.no_grad()
def _start_as_identity(transformer: FluxTransformer2DModel) -> None:
    """adaLN-Zero: gates and the output start at zero; Xavier elsewhere (DiT, Peebles and Xie)."""
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
            if name.endswith(("norm1.linear", "norm1_context.linear", "norm.linear")):
                nn.init.zeros_(module.weight)
    nn.init.zeros_(transformer.norm_out.linear.weight)
    nn.init.zeros_(transformer.proj_out.weight)
    for layer in (
        transformer.time_text_embed.timestep_embedder.linear_1,
        transformer.time_text_embed.timestep_embedder.linear_2,
    ):
        nn.init.normal_(layer.weight, std=0.02)
