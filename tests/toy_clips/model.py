"""A denoiser that knows its picture beforehand, and an autoencoder that scales.

Legend: B batch, C colour channels, T latent frames, h, w latent size, F = 4 (T - 1) + 1 frames.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from torch import Tensor, nn

CHANNELS = 3
SPACE, TIME = 4, 4


class ToyClipsTransformer(nn.Module):
    """Flow matching towards a moving disc: v = (x - x0) / sigma.

    x0 is mostly the scene that the text asks for, and a little of what the noise shows, so that
    seeds count. With a first frame, that is the ground.
    """

    def __init__(self, joint_attention_dim: int, seed_share: float = 0.25) -> None:
        super().__init__()
        self.seed_share = seed_share
        self.scene = nn.Linear(joint_attention_dim, 2 * CHANNELS + 3)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        first_frame: Tensor | None = None,
    ) -> Tensor:
        """[B, C, T, h, w], [B, L, D], [B] in 0..1000 -> [B, C, T, h, w]."""
        sigma = (timestep / 1000)[:, None, None, None, None].clamp(min=1e-3)
        scene = self._scene(hidden_states, encoder_hidden_states.mean(dim=1), first_frame)
        noise = hidden_states - (1 - sigma) * scene
        tint = torch.tanh(noise[:, :, :, :4, :4].mean(dim=(2, 3, 4), keepdim=True) * 6 / sigma)
        x0 = (1 - self.seed_share) * scene + self.seed_share * tint
        return (hidden_states - x0) / sigma

    def _scene(self, x: Tensor, text_BD: Tensor, first_frame: Tensor | None) -> Tensor:
        _, _, frames, height, width = x.shape
        facts = torch.tanh(self.scene(text_BD * 9))[:, :, None, None, None]
        ground, disc = facts[:, :CHANNELS], facts[:, CHANNELS : 2 * CHANNELS]
        way, start, size = facts[:, -3:].split(1, dim=1)
        if first_frame is not None:
            ground = first_frame[:, :, None]
        t = torch.linspace(-1, 1, frames).view(1, 1, -1, 1, 1)
        y = torch.linspace(-1, 1, height).view(1, 1, 1, -1, 1)
        x_ = torch.linspace(-1, 1, width).view(1, 1, 1, 1, -1) * width / height
        away = ((x_ - t * way.sign()) ** 2 + (y - 0.4 * start) ** 2).sqrt()
        inside = torch.sigmoid((0.5 + 0.1 * size - away) * 12)
        return ground * (1 - inside) + disc * inside


class ToyClipsVAE(nn.Module):
    """Latents are the pixels, scaled down; a first frame stands alone, the others come in fours."""

    def __init__(
        self,
        latent_channels: int = CHANNELS,
        block_out_channels: tuple[int, ...] = (1, 1, 1),
        temporal_compression_ratio: int = TIME,
    ) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def decode(self, z: Tensor, return_dict: bool = True) -> DecoderOutput | tuple[Tensor]:
        """[B, C, T, h, w] -> [B, 3, F, H, W]."""
        _, _, frames, height, width = z.shape
        size = (TIME * (frames - 1) + 1, SPACE * height, SPACE * width)
        clip = F.interpolate(z * self.gain, size, mode="trilinear", align_corners=frames > 1)
        return DecoderOutput(sample=clip) if return_dict else (clip,)

    def encode(self, x: Tensor) -> AutoencoderKLOutput:
        """[B, 3, H, W] -> [B, C, h, w]."""
        mean = F.avg_pool2d(x, SPACE)
        moments = torch.cat([mean, torch.full_like(mean, -30.0)], dim=1)
        return AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(moments))
