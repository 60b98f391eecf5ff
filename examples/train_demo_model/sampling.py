"""A sampler of its own for quick looks while training: Euler steps and true CFG, as FLUX's."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image, ImageDraw
from torch import Tensor
from transformers import CLIPTokenizer, T5Tokenizer

from examples.train_demo_model.grade import Fault, grade
from examples.train_demo_model.layout import CANVAS
from examples.train_demo_model.models import TOKEN_CHANNELS, TOKENS, DemoModel, decode
from examples.train_demo_model.phrases import parse, say
from examples.train_demo_model.render import to_uint8
from examples.train_demo_model.scenes import FORMS, Scene, distinct_scenes, form_of
from examples.train_demo_model.vocabulary import encode_clip, encode_t5

BATCH = 256
STEPS = 20


@dataclass(frozen=True, slots=True)
class Settings:
    """How to sample."""

    guidance: float = 3.0
    shift: float = 3.0
    steps: int = STEPS


@dataclass(frozen=True, slots=True)
class Score:
    """What the grader says of a set of pictures."""

    pictures: np.ndarray
    prompts: list[str]
    faults: list[list[Fault]]

    @property
    def right(self) -> int:
        """Number of pictures without a fault."""
        return sum(not faults for faults in self.faults)

    def table(self) -> dict[str, int]:
        """How many pictures have each sort of fault."""
        return dict(Counter(sort for faults in self.faults for sort in {f.sort for f in faults}))

    def by_form(self) -> dict[str, str]:
        """Right and number of the pictures of each form of scene, such as ``"30/32"``."""
        forms = [form_of(parse(prompt)) for prompt in self.prompts]
        total = Counter(forms)
        right = Counter(f for f, faults in zip(forms, self.faults, strict=True) if not faults)
        return {name: f"{right[name]}/{total[name]}" for name, _ in FORMS if total[name]}


def test_prompts(seed: int, count: int) -> tuple[list[Scene], list[str]]:
    """Held-out scenes and a prompt for each. Seed 0 is the final test; others choose settings."""
    scenes = distinct_scenes(seed, count)
    rng = random.Random(f"prompts {seed}")
    return scenes, [say(scene, rng) for scene in scenes]


def sigmas(settings: Settings) -> list[float]:
    """Noise levels of FlowMatchEulerDiscreteScheduler with a static shift, the final 0 included."""
    plain = np.linspace(1.0, 1.0 / settings.steps, settings.steps)
    shifted = settings.shift * plain / (1 + (settings.shift - 1) * plain)
    return [*shifted.tolist(), 0.0]


@torch.no_grad()
def sample(
    model: DemoModel,
    t5_ids: Tensor,
    clip_ids: Tensor,
    empty: tuple[Tensor, Tensor],
    settings: Settings,
    seed: int,
) -> Tensor:
    """Packed latents [B, 64, 64] for prompts; ``empty`` are the ids of the empty prompt [1, L]."""
    count, device = len(t5_ids), t5_ids.device
    dtype = model.transformer.x_embedder.weight.dtype
    both_t5 = torch.cat((t5_ids, empty[0].expand(count, -1)))
    both_clip = torch.cat((clip_ids, empty[1].expand(count, -1)))
    text = model.encode(both_t5, both_clip)
    generator = torch.Generator("cpu").manual_seed(seed)
    latents = torch.randn(count, TOKENS, TOKEN_CHANNELS, generator=generator).to(device)
    levels = sigmas(settings)
    for now, after in itertools.pairwise(levels):
        time_B = torch.full((2 * count,), now, device=device)
        velocity = model.denoise(latents.to(dtype).repeat(2, 1, 1), text, time_B).float()
        wanted, plain = velocity.chunk(2)
        latents = latents + (after - now) * (plain + settings.guidance * (wanted - plain))
    return latents


@torch.no_grad()
def score(
    model: DemoModel,
    vae: AutoencoderKL,
    tokenizers: tuple[CLIPTokenizer, T5Tokenizer],
    settings: Settings,
    *,
    seed: int,
    count: int,
) -> Score:
    """Samples held-out prompts and grades the pictures."""
    scenes, prompts = test_prompts(seed, count)
    device = model.transformer.x_embedder.weight.device
    clip, t5 = tokenizers

    def ids(texts: list[str]) -> tuple[Tensor, Tensor]:
        pair = encode_t5(t5, texts), encode_clip(clip, texts)
        return torch.from_numpy(pair[0]).long().to(device), torch.from_numpy(pair[1]).long().to(
            device
        )

    pictures = []
    for start in range(0, count, BATCH):
        batch = ids(prompts[start : start + BATCH])
        latents = sample(model, *batch, ids([""]), settings, seed=1000 + start)
        pictures.append(to_uint8(decode(vae, latents).clamp(-1, 1)))
    joined = np.concatenate(pictures)
    return Score(joined, prompts, [grade(p, s) for p, s in zip(joined, scenes, strict=True)])


def contact_sheet(result: Score, columns: int = 12, limit: int = 96) -> Image.Image:
    """Pictures in a grid, wrong ones first and framed in red, with their prompts beneath."""
    order = sorted(range(len(result.prompts)), key=lambda i: not result.faults[i])[: limit // 3]
    order += [i for i in range(len(result.prompts)) if i not in order][: limit - len(order)]
    cell_width, cell_height = CANVAS + 8, CANVAS + 52
    rows = -(-len(order) // columns)
    sheet = Image.new("RGB", (columns * cell_width, rows * cell_height), "white")
    draw = ImageDraw.Draw(sheet)
    for place, i in enumerate(order):
        x, y = place % columns * cell_width, place // columns * cell_height
        colour = "red" if result.faults[i] else "green"
        draw.rectangle((x + 1, y + 1, x + CANVAS + 6, y + CANVAS + 6), outline=colour, width=3)
        sheet.paste(Image.fromarray(result.pictures[i]), (x + 4, y + 4))
        draw.text((x + 4, y + CANVAS + 8), _wrap(result.prompts[i], 24), fill="black", font_size=10)
    return sheet


def _wrap(text: str, width: int) -> str:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
