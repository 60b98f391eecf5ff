"""Stage 2: the autoencoder, on freshly rendered scenes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor

from examples.train_demo_model.clock import Log
from examples.train_demo_model.engine import Batch, Engine, Schedule
from examples.train_demo_model.grade import grade
from examples.train_demo_model.layout import Layout, place
from examples.train_demo_model.models import (
    LATENT_CHANNELS,
    LATENT_SIDE,
    decode,
    decoded,
    move,
    pack,
    posterior,
)
from examples.train_demo_model.render import draw, palette_on, render, to_device, to_uint8
from examples.train_demo_model.scenes import distinct_scenes, draw_scenes

SCHEDULE = Schedule(peak=2e-3, warmup=200, decay_from=0.3)
POLISH = Schedule(peak=6e-4, warmup=200, decay_from=0.1)
"""For a trained autoencoder (``--vae-from``) that is trained on."""
EDGE_WEIGHT = 1.0
"""Of the error in neighbour differences: flat scenes are all edges, and blur costs most there."""
KL_WEIGHT = 2e-3
"""Strong for an autoencoder: 1,024 numbers are plenty for a scene, and the noise that it allows
in them makes the decoder forgive the DiT's small errors."""


def vae_draw(batch: int, seed: int, device: torch.device) -> Callable[[int], Batch]:
    """Draws layouts, and the lots of the posterior's sample."""
    # On the device as a whole: a copy in each step would make the host wait for the device.
    fields = to_device(_training_layouts(256 * batch, seed), device)
    shape = (LATENT_CHANNELS, LATENT_SIDE, LATENT_SIDE)

    def draw_batch(batches: int) -> Batch:
        count = batch * batches
        chosen = torch.randint(len(fields[0]), (count,), device=device)
        return (*(field[chosen] for field in fields), torch.randn(count, *shape, device=device))

    return draw_batch


def vae_step(vae: Any, batch: Batch, palette: Tensor) -> Tensor:
    """The stage's loss, on pictures rendered from the batch's layouts."""
    *fields, lots = batch
    image = draw(fields, palette)
    latents = posterior(vae, image.to(vae.dtype, memory_format=torch.channels_last))
    mean, spread = latents.mean.float(), latents.std.float()
    result = decoded(vae, (mean + spread * lots).to(vae.dtype)).float()
    error = result - image
    edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
    kl = 0.5 * (mean.square() + spread.square() - 1 - latents.logvar.float()).mean()
    return error.abs().mean() + error.square().mean() + EDGE_WEIGHT * edges + KL_WEIGHT * kl


def vae_engine(vae: AutoencoderKL, batch: int, seed: int, device: torch.device) -> Engine:
    """Trains the autoencoder in place, without an average."""
    move(vae, device)
    palette = palette_on(device)
    return Engine(
        vae.train(),
        vae,
        draw=vae_draw(batch, seed, device),
        loss=lambda work, batch: vae_step(work, batch, palette),
    )


@torch.no_grad()
def normalise(vae: AutoencoderKL, device: torch.device, count: int) -> None:
    """Measures the latents and stores the shift and scale that bring them to mean 0, variance 1."""
    layout = _training_layouts(count, seed=-1)
    vae.eval()
    latents = []
    for start in range(0, count, 256):
        image = render(layout.take(slice(start, start + 256)), device)
        latents.append(posterior(vae, image.to(vae.dtype)).mean.float())
    joined = torch.cat(latents)
    vae.register_to_config(
        shift_factor=joined.mean().item(), scaling_factor=1.0 / joined.std().item()
    )


@torch.no_grad()
def encode(vae: AutoencoderKL, image: Tensor) -> Tensor:
    """Packed, normalised latents [B, 64, 64] of pictures: the posterior's mean."""
    mean = posterior(vae, image.to(vae.dtype)).mean
    return pack((mean - vae.config["shift_factor"]) * vae.config["scaling_factor"])


@torch.no_grad()
def check_vae(vae: AutoencoderKL, log: Log, device: torch.device, count: int = 256) -> float:
    """Share of reconstructed held-out scenes that the grader finds right; also with noise added."""
    scenes = distinct_scenes(seed=77, count=count)
    layout = place(scenes, np.random.default_rng(77))
    right = {}
    psnr = 0.0
    for noise in (0.0, 0.1, 0.2):
        generator = torch.Generator(device).manual_seed(0)
        good = 0
        for start in range(0, count, 128):
            image = render(layout.take(slice(start, start + 128)), device)
            tokens = encode(vae, image)
            lots = torch.randn(
                tokens.shape, generator=generator, device=device, dtype=torch.float32
            )
            result = decode(vae, tokens + noise * lots.to(tokens.dtype)).float().clamp(-1, 1)
            if not noise:
                psnr = -10 * float(F.mse_loss(result, image).log10()) + 6.02
            pictures = to_uint8(result)
            good += sum(
                not grade(picture, scene)
                for picture, scene in zip(pictures, scenes[start : start + 128], strict=True)
            )
        right[f"right_noise_{noise}"] = good / count
    config = vae.config
    log(
        "vae check",
        **right,
        psnr=psnr,
        scaling_factor=config["scaling_factor"],
        shift_factor=config["shift_factor"],
    )
    return right["right_noise_0.0"]


def _training_layouts(count: int, seed: int) -> Layout:
    scenes = draw_scenes(random.Random(f"vae {seed}"), count, held_out=False)
    return place(scenes, np.random.default_rng(seed + 1))
