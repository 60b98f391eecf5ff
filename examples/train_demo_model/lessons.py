"""What is learnt in stages 4 and 5: the batches and losses of the text encoders and of the DiT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPTokenizer, T5Tokenizer

from examples.train_demo_model.engine import Batch
from examples.train_demo_model.layout import place
from examples.train_demo_model.models import DemoModel
from examples.train_demo_model.pool import CLIP_KEPT, Pool, size_classes
from examples.train_demo_model.sampling import test_prompts
from examples.train_demo_model.scenes import RELATIONS
from examples.train_demo_model.text import (
    Facts,
    TextHeads,
    facts_of,
    text_loss,
    text_report,
    whole_pixels,
)
from examples.train_demo_model.vocabulary import encode_clip, encode_t5, find_nouns

DROP_PROMPT = 0.1
UNIFORM_TIMES = 0.2
TIME_MEAN = 1.0
"""Of the logit of time: a shape's place is decided between times 0.75 and 0.95, since it fills
several tokens of 64 numbers and shows through much noise. Shift 3 in sampling does the same."""
TEXT_WEIGHT = 0.03
"""Of the text heads' loss while the DiT trains: keeps what the text stage has taught."""
NOT_MATRICES = ("embed", "shared", "relative_attention_bias", "heads.", "norm_out")
"""Weights that Muon is not for: tables, and the first and last layers."""
FIRST_AND_LAST = ("model.transformer.x_embedder.weight", "model.transformer.proj_out.weight")


class Pupil(nn.Module):
    """The model, and the heads that test its text encoders."""

    def __init__(self, model: DemoModel) -> None:
        super().__init__()
        self.model = model
        self.heads = TextHeads(model.sizes.t5_width, model.sizes.clip_width)

    def read(self, t5_BT: Tensor, clip_BL: Tensor, noun_B3: Tensor) -> list[Tensor]:
        """What the heads make of prompts."""
        return self.heads(*self.model.encode(t5_BT.long(), clip_BL.long()), noun_B3)


def is_matrix(name: str, weight: Tensor) -> bool:
    """True for the weights that Muon trains."""
    if name in FIRST_AND_LAST or weight.ndim != 2:
        return False
    middle = name.replace("text_embedder", "").replace("timestep_embedder", "")
    middle = middle.replace("context_embedder", "")
    return not any(part in middle for part in NOT_MATRICES)


def text_draw(pool: Pool, batch: int, device: torch.device) -> Callable[[int], Batch]:
    """Draws prompts with what is true of them."""

    def draw(batches: int) -> Batch:
        count = batch * batches
        chosen = torch.randint(len(pool.latents), (count,), device=device)
        saying = torch.randint(pool.t5.shape[1], (count,), device=device)
        prompts = pool.t5[chosen, saying], pool.clip[chosen, saying]
        return (*prompts, *facts_of(pool, chosen, saying))

    return draw


def text_step(pupil: Any, batch: Batch) -> Tensor:
    """Loss of the text stage."""
    t5, clip, *facts = batch
    known = Facts(*facts)
    return text_loss(pupil.read(t5, clip, known.noun), known)


def dit_draw(
    pool: Pool, empty: tuple[Tensor, Tensor], batch: int, device: torch.device
) -> Callable[[int], Batch]:
    """Draws latents, noise, times, prompts (some dropped) and what is true of them."""
    nothing = [ids.to(torch.int16) for ids in empty]

    def draw(batches: int) -> Batch:
        count = batch * batches
        chosen = torch.randint(len(pool.latents), (count,), device=device)
        saying = torch.randint(pool.t5.shape[1], (count,), device=device)
        kept = torch.rand(count, device=device) >= DROP_PROMPT
        t5 = torch.where(kept[:, None], pool.t5[chosen, saying], nothing[0])
        clip = torch.where(kept[:, None], pool.clip[chosen, saying], nothing[1])
        data = pool.latents[chosen]
        time_B = sample_times(count, device)
        noise = torch.randn(data.shape, device=device)
        return (data, noise, time_B, kept, t5, clip, *facts_of(pool, chosen, saying))

    return draw


def dit_step(pupil: Any, batch: Batch) -> Tensor:
    """Mean squared error of the velocity, and a little of the text stage's loss."""
    data, noise, time_B, kept, t5, clip, *facts = batch
    known = Facts(*facts)
    text = pupil.model.encode(t5.long(), clip.long())
    data, dtype = data.float(), text[0].dtype
    noisy = torch.lerp(data, noise, time_B[:, None, None])
    velocity = pupil.model.denoise(noisy.to(dtype), text, time_B)
    loss = F.mse_loss(velocity.float(), noise - data)
    return loss + TEXT_WEIGHT * text_loss(pupil.heads(*text, known.noun), known, kept)


def sample_times(count: int, device: torch.device) -> Tensor:
    """Times in 0..1: logit-normal (Esser et al., 2024, section 3.1) with a uniform share.

    Rounded to bf16, which is all that the network sees of them.
    """
    uniform = torch.rand(count, device=device)
    normal = torch.sigmoid(torch.randn(count, device=device) + TIME_MEAN)
    chosen = torch.where(torch.rand(count, device=device) < UNIFORM_TIMES, uniform, normal)
    return chosen.bfloat16().float()


@torch.no_grad()
def check_text(
    pupil: Pupil, tokenizers: tuple[CLIPTokenizer, T5Tokenizer], seed: int, count: int
) -> dict[str, float]:
    """What the heads read right of held-out prompts; ``off_px`` is a distance, the rest shares."""
    scenes, prompts = test_prompts(seed, count)
    device = pupil.heads.noun.weight.device
    t5_ids = encode_t5(tokenizers[1], prompts)
    layout = place(scenes, np.random.default_rng(seed))
    relation = np.full((count, 2), -1, np.int64)
    for row, scene in enumerate(scenes):
        for i, name in enumerate(scene.relations):
            relation[row, i] = RELATIONS.index(name)
    arrays = (
        *(find_nouns(t5_ids, tokenizers[1]), layout.kind, layout.colour, size_classes(scenes)),
        *(whole_pixels(layout.centre), layout.background),
    )
    facts = Facts(*(torch.from_numpy(array).to(device) for array in arrays))
    clip = torch.from_numpy(encode_clip(tokenizers[0], prompts)[:, :CLIP_KEPT]).to(device)
    parts = pupil.read(torch.from_numpy(t5_ids).to(device), clip, facts.noun)
    return text_report(parts, facts, torch.from_numpy(relation).to(device))
