"""What is learnt: batches and losses of the autoencoder, the text encoder and the denoiser."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_demo_model.engine import Batch
from examples.train_demo_model.lessons import sample_times
from examples.train_demo_model.render import palette_on
from examples.train_demo_model.scenes import KINDS, PALETTE, SIZES
from examples.train_demo_video.clips import MOTIONS, draw_clips, say
from examples.train_demo_video.models import (
    LATENT_SHAPE,
    DemoVideoModel,
    decoded,
    encode_clips,
    posterior,
)
from examples.train_demo_video.tracks import FRAMES, Tracks, draw_tracks, render, to_device
from examples.train_demo_video.vocabulary import encode_prompts, load_tokenizer

EDGE_WEIGHT = 1.0
"""Of the error in neighbour differences: flat clips are all edges, and blur costs most there."""
NEAR_WEIGHT = 10.0
"""Of a pixel near the shape beside one of the plain ground, which is nine tenths of a clip: without
it 260 s on an H200 left small crosses and stars round (36 of 64 clips right)."""
NEAR = 7
"""Pixels across, around each that is not the ground's."""
KL_WEIGHT = 2e-3
"""Strong: the noise that it allows in the latents makes the decoder forgive small errors."""
DROP_PROMPT = 0.1
TEXT_WEIGHT = 0.03
"""Of the text heads' loss while the denoiser trains: keeps what the text stage has taught."""
PARTS = (len(PALETTE), len(PALETTE), len(KINDS), len(MOTIONS), len(SIZES) + 1)
"""What the heads tell apart: background, colour, kind, motion, size (or open)."""
NOT_MATRICES = ("shared", "relative_attention_bias", "heads.", "patch_embedding", "table")
FIRST_AND_LAST = ("model.transformer.proj_out.weight",)
ENCODED_AT_ONCE = 128


class Pool(NamedTuple):
    """The training set of the denoiser, on the device."""

    latents: Tensor
    """[N, C, F, h, w], normalised; bf16 on a GPU."""
    ids: Tensor
    """int16 [N, P, T], for P prompts of each clip."""
    facts: Tensor
    """int64 [N, 5], in the order of :data:`PARTS`."""


class Pupil(nn.Module):
    """The model, and linear heads that must read the prompt off the text's mean state."""

    def __init__(self, model: DemoVideoModel) -> None:
        super().__init__()
        self.model = model
        self.heads = nn.Linear(model.sizes.text_width, sum(PARTS))

    def text_loss(self, states_BTD: Tensor, facts_B5: Tensor, keep_B: Tensor) -> Tensor:
        """Cross-entropies of what a prompt says, of the rows to keep."""
        logits = self.heads(states_BTD.mean(dim=1)).float().split(PARTS, dim=-1)
        rows = torch.stack(
            [
                F.cross_entropy(part, facts_B5[:, index], reduction="none")
                for index, part in enumerate(logits)
            ]
        ).sum(dim=0)
        return (rows * keep_B).sum() / keep_B.sum().clamp(min=1)

    @torch.no_grad()
    def read(self, ids_BT: Tensor, facts_B5: Tensor) -> float:
        """Share of prompts of which the heads read everything right."""
        logits = self.heads(self.model.encode(ids_BT).mean(dim=1)).split(PARTS, dim=-1)
        found = torch.stack([part.argmax(dim=-1) for part in logits], dim=1)
        return float((found == facts_B5).all(dim=1).float().mean())


def is_matrix(name: str, weight: Tensor) -> bool:
    """True for the weights that Muon trains."""
    embedders = ("time_embedder", "text_embedder", "time_proj")
    if name in FIRST_AND_LAST or weight.ndim != 2 or any(part in name for part in embedders):
        return False
    return not any(part in name for part in NOT_MATRICES)


def training_tracks(seed: int, count: int) -> Tracks:
    """Tracks of random clips that are not held out."""
    clips = draw_clips(random.Random(f"vae {seed}"), count, held_out=False)
    return draw_tracks(clips, np.random.default_rng(seed))


def vae_draw(
    batch: int, seed: int, device: torch.device, frames: int = FRAMES
) -> Callable[[int], Batch]:
    """Draws tracks, and the lots of the posterior's sample."""
    channels, _, *place = LATENT_SHAPE
    shape = (channels, 1 + (frames - 1) // 4, *place)
    fields = to_device(training_tracks(seed, 512 * batch), device)

    def draw(batches: int) -> Batch:
        count = batch * batches
        chosen = torch.randint(len(fields[0]), (count,), device=device)
        lots = torch.randn(count, *shape, device=device)
        return (*(field[chosen] for field in fields), lots)

    return draw


def vae_step(vae: Any, batch: Batch, palette: Tensor, frames: int = FRAMES) -> Tensor:
    """The autoencoder's loss, on the first frames of clips rendered from the batch's tracks."""
    *fields, lots = batch
    clips = render(list(fields), palette)[:, :, :frames]
    latents = posterior(vae, clips.to(vae.dtype))
    mean, spread = latents.mean.float(), latents.std.float()
    error = decoded(vae, (mean + spread * lots).to(vae.dtype)).float() - clips
    weight = near_shape(clips)
    pixels = (weight * (error.abs() + error.square())).mean()
    edges: Tensor = sum(  # pyright: ignore[reportAssignmentType]
        (weight.narrow(axis, 1, error.shape[axis] - 1) * error.diff(dim=axis).abs()).mean()
        for axis in (2, 3, 4)
    )
    kl = 0.5 * (mean.square() + spread.square() - 1 - latents.logvar.float()).mean()
    return pixels + EDGE_WEIGHT * edges + KL_WEIGHT * kl


def near_shape(clips: Tensor) -> Tensor:
    """What each pixel's error counts, [B, 1, F, H, W], one on average; a corner is ground."""
    apart = (clips - clips[..., :1, :1]).abs().amax(1, keepdim=True)
    apart, reach = (apart > 0.02).float(), NEAR // 2
    near = F.max_pool3d(apart, (1, NEAR, NEAR), stride=1, padding=(0, reach, reach))
    weight = 1 + NEAR_WEIGHT * near
    return weight / weight.mean()


@torch.no_grad()
def normalise(vae: Any, device: torch.device, count: int) -> None:
    """Measure each channel's mean and deviation, and store them in the autoencoder's config."""
    fields = to_device(training_tracks(-1 % 2**31, count), device)
    palette = palette_on(device)
    vae.eval()
    found = []
    for start in range(0, count, ENCODED_AT_ONCE):
        clips = render([field[start : start + ENCODED_AT_ONCE] for field in fields], palette)
        found.append(posterior(vae, clips.to(vae.dtype)).mean.float())
    joined = torch.cat(found)
    axes = (0, 2, 3, 4)
    mean, std = joined.mean(axes).tolist(), joined.std(axes).clamp(min=1e-3).tolist()
    vae.register_to_config(latents_mean=mean, latents_std=std)


@torch.no_grad()
def build_pool(vae: Any, tokenizers: Path, count: int, prompts: int, device: torch.device) -> Pool:
    """Clips, encoded, with so many prompts of each."""
    rng = random.Random("pool")
    clips = draw_clips(rng, count, held_out=False)
    tokenizer = load_tokenizer(tokenizers)
    words = [say(clip, rng) for clip in clips for _ in range(prompts)]
    ids = encode_prompts(tokenizer, words).reshape(count, prompts, -1)
    tracks = draw_tracks(clips, np.random.default_rng(1))
    fields, palette = to_device(tracks, device), palette_on(device)
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    latents = torch.empty(count, *LATENT_SHAPE, dtype=half, device=device)
    for start in range(0, count, ENCODED_AT_ONCE):
        part = slice(start, start + ENCODED_AT_ONCE)
        latents[part] = encode_clips(vae, render([field[part] for field in fields], palette))
    motion = [MOTIONS.index(clip.motion) for clip in clips]
    size = [SIZES.index(clip.size) if clip.size else len(SIZES) for clip in clips]
    rows = (tracks.background, tracks.colour, tracks.kind, motion, size)
    facts = torch.from_numpy(np.stack([np.asarray(row, dtype=np.int64) for row in rows], axis=1))
    return Pool(latents, torch.from_numpy(ids).to(device), facts.to(device))


def text_draw(pool: Pool, batch: int, device: torch.device) -> Callable[[int], Batch]:
    """Draws prompts with what they say."""

    def draw(batches: int) -> Batch:
        count = batch * batches
        chosen = torch.randint(len(pool.ids), (count,), device=device)
        saying = torch.randint(pool.ids.shape[1], (count,), device=device)
        return pool.ids[chosen, saying], pool.facts[chosen]

    return draw


def text_step(pupil: Any, batch: Batch) -> Tensor:
    """Loss of the text stage."""
    ids, facts = batch
    states = pupil.model.encode(ids.long())
    return pupil.text_loss(states, facts, torch.ones(len(ids), device=ids.device))


def dit_draw(pool: Pool, empty: Tensor, batch: int, device: torch.device) -> Callable[[int], Batch]:
    """Draws latents, noise, times, and prompts, of which some are dropped."""
    nothing = empty.to(pool.ids.dtype)

    def draw(batches: int) -> Batch:
        count = batch * batches
        chosen = torch.randint(len(pool.latents), (count,), device=device)
        saying = torch.randint(pool.ids.shape[1], (count,), device=device)
        kept = torch.rand(count, device=device) >= DROP_PROMPT
        ids = torch.where(kept[:, None], pool.ids[chosen, saying], nothing)
        noise = torch.randn(count, *LATENT_SHAPE, device=device)
        time = sample_times(count, device)
        return pool.latents[chosen], noise, time, kept.float(), ids, pool.facts[chosen]

    return draw


def dit_step(pupil: Any, batch: Batch) -> Tensor:
    """Mean squared error of the velocity, and a little of the text stage's loss."""
    data, noise, time_B, kept, ids, facts = batch
    text = pupil.model.encode(ids.long())
    data = data.float()
    noisy = torch.lerp(data, noise, time_B[:, None, None, None, None])
    velocity = pupil.model.denoise(noisy.to(text.dtype), text, time_B)
    loss = F.mse_loss(velocity.float(), noise - data)
    return loss + TEXT_WEIGHT * pupil.text_loss(text, facts, kept)
