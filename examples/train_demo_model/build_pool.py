"""Stage 3, the device's half: renders and encodes the pool's scenes."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from examples.train_demo_model.clock import Log
from examples.train_demo_model.models import move
from examples.train_demo_model.pool import Pool, RowMaker
from examples.train_demo_model.render import render
from examples.train_demo_model.text import whole_pixels
from examples.train_demo_model.vae import encode

ENCODE_BATCH = 1024


def build_pool(
    vae: AutoencoderKL, rows: RowMaker, deadline: float, log: Log, device: torch.device
) -> Pool | None:
    """The pool on the device, or None if the piece ended before it was complete."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    move(vae, device, dtype)
    vae.eval()
    latents: list[Tensor] = []
    others: list[tuple[np.ndarray, ...]] = []
    next_report = 0.0
    for index in range(len(rows)):
        if time.monotonic() >= deadline:
            return None
        chunk = rows.chunk(index)
        for start in range(0, len(chunk.t5), ENCODE_BATCH):
            image = render(chunk.layout.take(slice(start, start + ENCODE_BATCH)), device)
            image = image.to(dtype, memory_format=torch.channels_last)
            latents.append(encode(vae, image).to(torch.bfloat16))
        layout = chunk.layout
        centre = whole_pixels(layout.centre)
        facts = (layout.kind, layout.colour, chunk.size, centre, layout.background)
        others.append((chunk.t5, chunk.clip, chunk.noun, *facts))
        if log.seconds() >= next_report:
            next_report = log.seconds() + 5
            log("pool", chunk=index + 1, of=len(rows))
    fields = zip(*others, strict=True)
    pool = Pool(
        torch.cat(latents),
        *(torch.from_numpy(np.concatenate(field)).to(device) for field in fields),
    )
    spread = pool.latents[:4096].float()
    log(
        "pool",
        scenes=len(pool.latents),
        gigabytes=pool.latents.nbytes / 1e9,
        mean=spread.mean().item(),
        std=spread.std().item(),
    )
    vae.float()
    return pool


def save_pool(pool: Pool, file: Path) -> None:
    """Writes the pool for the next piece: under another name first, so that it is whole."""
    part = file.with_suffix(".part")
    torch.save(pool._asdict(), part)
    part.rename(file)


def load_pool(file: Path, device: torch.device) -> Pool:
    """The pool of an earlier piece."""
    saved = torch.load(file, map_location=device, weights_only=True, mmap=True)
    return Pool(**saved)
