"""A sampler of its own for quick looks while training: Euler steps with guidance; and scores."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from transformers import T5Tokenizer

from examples.train_demo_model.sampling import Score, Settings, sigmas
from examples.train_demo_video.clips import held_out_prompts
from examples.train_demo_video.grade import grade
from examples.train_demo_video.models import LATENT_SHAPE, DemoVideoModel, decode
from examples.train_demo_video.tracks import CANVAS, to_uint8
from examples.train_demo_video.vocabulary import encode_prompts

BATCH = 128
SHOWN = 5
"""Frames of a clip on the contact sheet."""


@torch.no_grad()
def sample(
    model: DemoVideoModel, ids_BT: Tensor, empty_1T: Tensor, settings: Settings, seed: int
) -> Tensor:
    """Normalised latents [B, C, F, h, w] for prompts."""
    count, device = len(ids_BT), ids_BT.device
    dtype = model.transformer.proj_out.weight.dtype
    text = model.encode(torch.cat((ids_BT, empty_1T.expand(count, -1))))
    generator = torch.Generator("cpu").manual_seed(seed)
    latents = torch.randn(count, *LATENT_SHAPE, generator=generator).to(device)
    for now, after in itertools.pairwise(sigmas(settings)):
        time_B = torch.full((2 * count,), now, device=device)
        both = latents.to(dtype).repeat(2, 1, 1, 1, 1)
        wanted, plain = model.denoise(both, text, time_B).float().chunk(2)
        latents = latents + (after - now) * (plain + settings.guidance * (wanted - plain))
    return latents


@torch.no_grad()
def score(
    model: DemoVideoModel,
    vae: Any,
    tokenizer: T5Tokenizer,
    settings: Settings,
    *,
    seed: int,
    count: int,
) -> Score:
    """Samples held-out prompts and grades the clips."""
    asked, prompts = held_out_prompts(seed, count)
    device = model.transformer.proj_out.weight.device

    def ids(texts: list[str]) -> Tensor:
        return torch.from_numpy(encode_prompts(tokenizer, texts)).long().to(device)

    made = []
    for start in range(0, count, BATCH):
        batch = ids(prompts[start : start + BATCH])
        latents = sample(model, batch, ids([""]), settings, seed=1000 + start)
        made.append(to_uint8(decode(vae, latents).clamp(-1, 1)))
    joined = np.concatenate(made)
    return Score(joined, prompts, [grade(c, a) for c, a in zip(joined, asked, strict=True)])


def contact_sheet(result: Score, *, columns: int = 3, limit: int = 60) -> Image.Image:
    """Some frames of each clip with its prompt; wrong clips first, framed in red."""
    order = sorted(range(len(result.prompts)), key=lambda i: not result.faults[i])[:limit]
    width, height = SHOWN * CANVAS + 10, CANVAS + 40
    sheet = Image.new("RGB", (columns * width, -(-len(order) // columns) * height), "white")
    draw = ImageDraw.Draw(sheet)
    for place, i in enumerate(order):
        x, y = place % columns * width, place // columns * height
        chosen = np.linspace(0, result.pictures.shape[1] - 1, SHOWN).round().astype(int)
        strip = np.concatenate(list(result.pictures[i][chosen]), axis=1)
        colour = "red" if result.faults[i] else "green"
        draw.rectangle((x + 1, y + 1, x + width - 4, y + CANVAS + 6), outline=colour, width=3)
        sheet.paste(Image.fromarray(strip), (x + 4, y + 4))
        draw.text((x + 4, y + CANVAS + 8), result.prompts[i][:60], fill="black", font_size=11)
    return sheet
