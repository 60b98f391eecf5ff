"""Stage 2: the autoencoder, on freshly rendered scenes."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor

from examples.train_demo_model.clock import Clock, Log, learning_rate
from examples.train_demo_model.grade import grade
from examples.train_demo_model.layout import Layout, place
from examples.train_demo_model.models import decode, decoded, move, pack, posterior
from examples.train_demo_model.render import draw, palette_on, render, to_device, to_uint8
from examples.train_demo_model.scenes import distinct_scenes, draw_scenes

PEAK_RATE = 2e-3
EDGE_WEIGHT = 1.0
"""Of the error in neighbour differences: flat scenes are all edges, and blur costs most there."""
KL_WEIGHT = 2e-3
"""Strong for an autoencoder: 1,024 numbers are plenty for a scene, and the noise that it allows
in them makes the decoder forgive the DiT's small errors."""


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """bf16 where there is a GPU; float32 on the CPU."""
    if device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return nullcontext()


def vae_loss(vae: AutoencoderKL, image: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and its parts for pictures [B, 3, H, W] in -1..1."""
    latents = posterior(vae, image)
    result = decoded(vae, latents.sample()).float()
    error = result - image
    parts = {
        "l1": error.abs().mean(),
        "l2": error.square().mean(),
        "edge": (error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()),
    }
    mean, variance = latents.mean.float(), latents.var.float()
    parts["kl"] = 0.5 * (mean.square() + variance - 1 - latents.logvar.float()).mean()
    loss = parts["l1"] + parts["l2"] + EDGE_WEIGHT * parts["edge"] + KL_WEIGHT * parts["kl"]
    return loss, parts


def train_vae(
    vae: AutoencoderKL, clock: Clock, state_file: Path, batch: int, log: Log, device: torch.device
) -> bool:
    """Trains until the clock says so; True when the stage is complete."""
    move(vae, device)
    vae.train()
    optimizer = torch.optim.AdamW(
        vae.parameters(), lr=PEAK_RATE, weight_decay=0.01, betas=(0.9, 0.98), fused=True
    )
    if state_file.exists():
        saved = torch.load(state_file, map_location=device, weights_only=True)
        vae.load_state_dict(saved["vae"])
        optimizer.load_state_dict(saved["optimizer"])
        clock.steps, clock.seconds = saved["clock"]["steps"], saved["clock"]["seconds"]

    # On the device as a whole: a copy in each step would make the host wait for the device.
    fields = to_device(_training_layouts(256 * batch, seed=clock.steps), device)
    palette = palette_on(device)
    next_report = 0.0
    while not (clock.done or clock.out_of_time):
        chosen = torch.randint(len(fields[0]), (batch,), device=device)
        image = draw([field[chosen] for field in fields], palette)
        image = image.to(memory_format=torch.channels_last)
        rate = learning_rate(PEAK_RATE, clock.fraction, clock.steps, warmup=200, decay_from=0.4)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with autocast(device):
            loss, parts = vae_loss(vae, image)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        clock.tick()
        if log.seconds() >= next_report:
            next_report = log.seconds() + 5
            shown = {name: value.item() for name, value in parts.items()}
            log("vae", step=clock.steps, **shown, done=clock.fraction, eta=clock.eta(), lr=rate)
    state_file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {"vae": vae.state_dict(), "optimizer": optimizer.state_dict(), "clock": clock.state()},
        state_file,
    )
    return clock.done


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
