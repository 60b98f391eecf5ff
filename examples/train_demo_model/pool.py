"""Stage 3: the pool, all that the DiT's training reads: latents and token ids, on the device.

Scenes, prompts, token ids and layouts are made by worker processes while the autoencoder trains;
pictures are rendered and encoded on the device afterwards.
"""

from __future__ import annotations

import multiprocessing
import os
import random
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from examples.train_demo_model.layout import Layout, place
from examples.train_demo_model.phrases import say
from examples.train_demo_model.scenes import SIZES, Scene, draw_scenes
from examples.train_demo_model.vocabulary import (
    encode_clip,
    encode_t5,
    find_nouns,
    load_tokenizers,
)

if TYPE_CHECKING:
    # Workers import this module, and start without torch.
    from torch import Tensor

CLIP_KEPT = 40
"""CLIP tokens kept: the encoder is causal and pools at the first end token, which comes earlier."""
CHUNK = 8192
PROMPTS_PER_SCENE = 2


class Rows(NamedTuple):
    """A part of the pool before the device has seen it."""

    layout: Layout
    t5: np.ndarray
    """int16 [B, P, 40], for P prompts of each scene."""
    clip: np.ndarray
    """int16 [B, P, 40]."""
    noun: np.ndarray
    """int8 [B, P, 3], where the nouns stand among the T5 tokens."""
    size: np.ndarray
    """int8 [B, 3]: small, large, open."""


class Pool(NamedTuple):
    """The training set, on the device."""

    latents: Tensor
    """bf16 [B, 64, 64], packed and normalised."""
    t5: Tensor
    """int16 [B, P, 40]."""
    clip: Tensor
    """int16 [B, P, 40]."""
    noun: Tensor
    """int8 [B, P, 3]; this and the rest as in :class:`~.text.Facts`."""
    kind: Tensor
    colour: Tensor
    size: Tensor
    centre: Tensor
    background: Tensor


def make_rows(seed: int, count: int, tokenizers: Path) -> Rows:
    """``count`` random scenes that are not held out, laid out, put into words and tokenised."""
    rng = random.Random(f"pool {seed}")
    scenes = draw_scenes(rng, count, held_out=False)
    prompts = [say(scene, rng) for scene in scenes for _ in range(PROMPTS_PER_SCENE)]
    clip, t5 = load_tokenizers(tokenizers)
    clip_ids = encode_clip(clip, prompts)[:, :CLIP_KEPT]
    assert (clip_ids[:, -1] == clip.eos_token_id).all(), "a prompt is longer than CLIP_KEPT"
    t5_ids = encode_t5(t5, prompts)
    return Rows(
        place(scenes, np.random.default_rng(seed)),
        t5_ids.reshape(count, PROMPTS_PER_SCENE, -1),
        clip_ids.reshape(count, PROMPTS_PER_SCENE, -1),
        find_nouns(t5_ids, t5).reshape(count, PROMPTS_PER_SCENE, -1),
        size_classes(scenes),
    )


def size_classes(scenes: list[Scene]) -> np.ndarray:
    """int8 [B, 3]: small, large, open."""
    sizes = np.full((len(scenes), 3), len(SIZES), np.int8)
    for row, scene in enumerate(scenes):
        for i, shape in enumerate(scene.shapes):
            if shape.size:
                sizes[row, i] = SIZES.index(shape.size)
    return sizes


class RowMaker:
    """Makes the pool's rows in the background; with no workers, when asked for them."""

    def __init__(self, count: int, tokenizers: Path, workers: int) -> None:
        chunk = min(count, CHUNK)
        self._jobs = [(seed, chunk, tokenizers) for seed in range(count // chunk)]
        self._executor = None
        self._futures: list[Future[Rows]] = []
        if workers:
            # Spawned processes: forking a process that has started CUDA is not safe.
            self._executor = ProcessPoolExecutor(
                workers, multiprocessing.get_context("spawn"), initializer=_calm_worker
            )
            self._futures = [self._executor.submit(make_rows, *job) for job in self._jobs]

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self._jobs)

    def chunk(self, index: int) -> Rows:
        """A part of the rows; waits for it."""
        if self._executor is None:
            return make_rows(*self._jobs[index])
        return self._futures[index].result()

    def close(self) -> None:
        """Ends the worker processes."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


def _calm_worker() -> None:
    """A worker is one process of many: its libraries must not start threads of their own."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
