"""Wan on several ranks against one: every split, alone and together, from text to pixels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ranks import run_ranks
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelLayout, ParallelState
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.server_args import ServerArgs

from parity.harness import checkpoint_folder
from parity.tiny_wan import TinyWan
from parity.wan_requests import EXPERTS, IMAGE, SMALL, request

LIMIT = 1e-5
GROUPS = ("tp", "ulysses", "ring", "cfg", "replica", "weights")
MODELS = {"experts": EXPERTS, "5B": SMALL, "image": IMAGE}
LAYOUTS = {
    "tp=4": ParallelLayout(tp=4),
    "ulysses=4": ParallelLayout(ulysses=4),
    "ring=4": ParallelLayout(ring=4),
    "ulysses x ring": ParallelLayout(ulysses=2, ring=2),
    "tp x ulysses": ParallelLayout(tp=2, ulysses=2),
    "tp x ring": ParallelLayout(tp=2, ring=2),
    "cfg x tp": ParallelLayout(cfg=2, tp=2),
    "cfg x ulysses": ParallelLayout(cfg=2, ulysses=2),
}
PAIRS = {
    "tp=2": ParallelLayout(tp=2),
    "cfg=2": ParallelLayout(cfg=2),
    "ulysses=2": ParallelLayout(ulysses=2),
}


@dataclass(frozen=True)
class Result:
    """Of one request on one rank."""

    latents: np.ndarray
    pixels: np.ndarray
    traffic: dict[str, dict[str, int]]
    vae: str


def describe(path: str) -> ModelDescription:
    return ModelDescription.find(
        ServerArgs.from_flat(model_path=path, device="cpu", precision="fp32")
    )


@torch.inference_mode()
def run(pipeline: Any, description: ModelDescription, values: dict[str, Any]) -> Result:
    (batch,) = description.admit(description.sampling_params(values).seal())
    groups = {name: getattr(pipeline.parallel, name) for name in GROUPS}
    before = {name: group.traffic.copy() for name, group in groups.items()}
    latents = np.empty(0)
    for name, stage in pipeline.stages.items():
        if name == "decoding_stage":
            latents = batch.latents.numpy().copy()
        batch = stage(batch, pipeline.server_args)
    traffic = {name: dict(group.traffic - before[name]) for name, group in groups.items()}
    vae = pipeline.stages["decoding_stage"].work.mode
    return Result(latents, batch.output.numpy(), traffic, vae)


def _on_rank(
    _rank: int, layouts: list[ParallelLayout], work: list[tuple[str, dict[str, Any]]]
) -> list[list[Result]]:
    results = []
    for layout in layouts:
        parallel = ParallelState.create(layout, "cpu")
        results.append([])
        for path, values in work:
            description = describe(path)
            pipeline = description.open_pipeline(parallel=parallel)
            results[-1].append(run(pipeline, description, values))
    return results


def _measured(checkpoints: Path, layouts: dict[str, ParallelLayout]) -> dict[Any, Any]:
    """(layout, model) -> what one rank made, and what each of several did."""
    work = [
        (str(checkpoint_folder(tiny, checkpoints)), request(tiny, checkpoints))
        for tiny in MODELS.values()
    ]
    alone = []
    for path, values in work:
        description = describe(path)
        alone.append(run(description.open_pipeline(), description, values))
    size = next(iter(layouts.values())).world_size
    ranks = run_ranks(size, _on_rank, list(layouts.values()), work, timeout=500)
    return {
        (layout, model): (alone[j], [rank[i][j] for rank in ranks])
        for i, layout in enumerate(layouts)
        for j, model in enumerate(MODELS)
    }


@pytest.fixture(scope="module")
def four(checkpoints: Path) -> dict[Any, Any]:
    return _measured(checkpoints, LAYOUTS)


@pytest.fixture(scope="module")
def two(checkpoints: Path) -> dict[Any, Any]:
    return _measured(checkpoints, PAIRS)


def _assert_equal(alone: Result, ranks: list[Result]) -> None:
    for rank in ranks:
        off = np.linalg.norm(rank.latents - alone.latents) / np.linalg.norm(alone.latents)
        assert off < LIMIT, f"{off:.1e}"
        assert np.array_equal(rank.latents, ranks[0].latents)
    first = ranks[0].pixels.astype(int)
    assert np.abs(first - alone.pixels.astype(int)).max() <= 1
    assert all(rank.pixels.size == 0 for rank in ranks[1:])
    assert np.ptp(first) > 200, "a flat clip would hide errors"


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_make_the_clip_of_one(four, layout, model):
    alone, ranks = four[layout, model]
    _assert_equal(alone, ranks)
    wanted, sent = LAYOUTS[layout], ranks[0].traffic
    for name in ("tp", "ulysses", "ring", "cfg"):
        assert bool(sent[name]) == (getattr(wanted, name) > 1), name
    assert ranks[0].vae == "spatial_shard"
    assert sent["replica"]["exchange"] > 20, "the autoencoder's rows were not shared out"


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", PAIRS)
def test_two_ranks_make_the_clip_of_one(two, layout, model):
    alone, ranks = two[layout, model]
    _assert_equal(alone, ranks)
    tiny: TinyWan = MODELS[model]
    if layout == "cfg=2":
        assert ranks[0].traffic["cfg"] == {"all_gather": 2}  # a step
    if layout == "tp=2":
        # Two blocks of three projections with q and k norms, for two branches and two steps.
        norms = 4 + (tiny.image == "clip")
        assert ranks[0].traffic["tp"] == {"all_reduce": 2 * 2 * 2 * (3 + norms)}
