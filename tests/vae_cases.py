"""Autoencoders that tests of parallel and tiled decoding share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import sglang.multimodal_gen
from sglang.multimodal_gen.runtime.models.vaes.autoencoder_kl import AutoencoderKL
from sglang.multimodal_gen.runtime.verify.tiny_weights import fill_with_noise

BUNDLED = Path(str(sglang.multimodal_gen.__file__)).parent / "bundled/demo/vae"


def tiny_config() -> dict[str, Any]:
    """Constructor arguments of a four-level autoencoder with narrow layers."""
    return {
        "block_out_channels": (8, 8, 16, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "latent_channels": 4,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "sample_size": 64,
    }


def tiny_vae() -> AutoencoderKL:
    """It, with weights that hide nothing; the same on every call."""
    vae = AutoencoderKL(**tiny_config())
    fill_with_noise(vae, 11)
    return vae.eval().requires_grad_(False)


def bundled_vae() -> AutoencoderKL:
    """The demo's, trained."""
    config = json.loads((BUNDLED / "config.json").read_text())
    vae = AutoencoderKL(**{k: v for k, v in config.items() if not k.startswith("_")})
    vae.load_state_dict(load_file(BUNDLED / "diffusion_pytorch_model.safetensors"))
    return vae.eval().requires_grad_(False)


def noise(*shape: int, seed: int = 7) -> Tensor:
    """Standard normal numbers, the same on every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(measured: Tensor, expected: Tensor) -> float:
    """``|measured - expected| / |expected|``."""
    return ((measured - expected).norm() / expected.norm()).item()
