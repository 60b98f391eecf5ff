"""Qwen-Image on several ranks against one: denoiser, encoder, whole pipeline.

Each run of processes measures everything that its layouts have to show; the tests read what it saw.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from ranks import run_ranks
from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelLayout, ParallelState
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.platforms.device import device_facts
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.resolve import resolve

from parity.harness import checkpoint_folder
from parity.tiny_qwen_image import CHANNELS, TEXT_WIDTH, qwen_image_for_ranks

LIMIT = 1e-5
VISIBLE = 1e-2
STEPS = 2
REQUEST: dict[str, Any] = {
    "prompt": "a small red circle above the fox",
    "negative_prompt": "blue",
    "true_cfg_scale": 3.0,
    "seed": 5,
    "height": 112,
    "width": 80,  # 35 image tokens
    "num_inference_steps": STEPS,
}
SEVERAL = {**REQUEST, "prompt": [REQUEST["prompt"], "zzz"]}
"""Of two lengths: the shorter one is masked."""
TWO = {"tp": 2}, {"ulysses": 2}, {"ring": 2}, {"cfg": 2}
FOUR = (
    {"tp": 4},
    {"ulysses": 4},
    {"ring": 4},
    {"ulysses": 2, "ring": 2},
    {"tp": 2, "ulysses": 2},
    {"tp": 2, "ring": 2},
    {"cfg": 2, "ulysses": 2},
)


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def describe(path: str) -> ModelDescription:
    args = ServerArgs.from_flat(model_path=path, device="cpu", precision="fp32")
    return ModelDescription.find(resolve(args, device_facts()).args)


@torch.no_grad()
def velocity(model: Any) -> Tensor:
    """Forwards with and without references and masks, on odd counts of tokens."""
    generator = torch.Generator().manual_seed(1)
    text, image = 9, (7, 5)
    out = []
    for references in ((), ((3, 5), (2, 2))):
        tokens = sum(height * width for height, width in (image, *references))
        given = {
            "hidden_states": torch.randn(2, tokens, 4 * CHANNELS, generator=generator),
            "encoder_hidden_states": torch.randn(2, text, TEXT_WIDTH, generator=generator),
            "timestep": torch.tensor([0.3, 0.7]),
            "rotary": model.rotary_embedding(text, image, references),
        }
        mask = torch.arange(text) < torch.tensor([text, text - 4])[:, None]
        for masked in (None, mask):
            out.append(model(**given, encoder_hidden_states_mask=masked).flatten())
    return torch.cat(out)


@torch.no_grad()
def embedding(model: Any) -> Tensor:
    """A text, and one with a picture of 4 x 6 patches."""
    token = model.config.image_token_id
    words = torch.arange(5, 25)[None]
    seen = torch.cat((words[:, :7], torch.full((1, 6), token), words[:, 7:]), 1)
    pixels = torch.randn(24, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(2))
    grid = torch.tensor([[1, 4, 6]])
    parts = (model(words), model(seen, pixel_values=pixels, image_grid_thw=grid))
    return torch.cat([part.last_hidden_state.flatten() for part in parts])


@torch.inference_mode()
def latents(model: ModelDescription, pipeline: Any, request: dict[str, Any]) -> Tensor:
    """The latents at the end of the loop."""
    (batch,) = model.admit(model.sampling_params(request).seal())
    for name, stage in pipeline.stages.items():
        if name != "decoding_stage":
            batch = stage(batch, pipeline.server_args)
    return batch.latents


def compared(function: Any, many: nn.Module, one: nn.Module, groups: list[Group]) -> dict[str, Any]:
    """How far ranks are from one, what they sent, and how far they are if sums are left out."""
    whole = function(one)
    for group in groups:
        group.traffic.clear()
    found: dict[str, Any] = {"off": relative(function(many), whole)}
    found["traffic"] = {group.name: dict(group.traffic) for group in groups if group.traffic}
    with patch.object(Group, "all_reduce", lambda _, x: x):
        found["unreduced"] = relative(function(many), whole)
    return found


def _measure(
    _rank: int, path: str, editing: str, layouts: tuple[dict[str, int], ...]
) -> list[dict[str, Any]]:
    model, editor = describe(path), describe(editing)
    one, seeing = model.open_pipeline(), editor.open_pipeline()
    expected = [latents(model, one, request) for request in (REQUEST, SEVERAL)]
    seen = []
    for sizes in layouts:
        parallel = ParallelState.create(ParallelLayout(**sizes), "cpu")
        many = model.open_pipeline(parallel=parallel)
        pairs = {
            "transformer": (velocity, many, one),
            "text_encoder": (embedding, editor.open_pipeline(parallel=parallel), seeing),
        }
        groups = [parallel.tp, parallel.sp, parallel.ulysses, parallel.ring, *parallel.spreads]
        found: dict[str, Any] = {"sizes": sizes}
        for name, (function, *pipelines) in pairs.items():
            modules = (pipeline.modules[name] for pipeline in pipelines)
            found[name] = compared(function, *modules, groups=groups)
        parallel.cfg.traffic.clear()
        found["latents"] = [
            relative(latents(model, many, request), whole)
            for request, whole in zip((REQUEST, SEVERAL), expected, strict=True)
        ]
        found["branches"] = dict(parallel.cfg.traffic)
        seen.append(found)
    return seen


@pytest.fixture(scope="module")
def root(checkpoints: Path) -> str:
    checkpoint = qwen_image_for_ranks(
        "qwen-image-ranks-zero", transformer={"num_attention_heads": 4, "zero_cond_t": True}
    )
    return str(checkpoint_folder(checkpoint, checkpoints))


@pytest.fixture(scope="module")
def editing(checkpoints: Path) -> str:
    """One whose encoder has its vision tower."""
    pipeline = "QwenImageEditPipeline"
    checkpoint = qwen_image_for_ranks("qwen-image-ranks-edit", pipeline=pipeline)
    return str(checkpoint_folder(checkpoint, checkpoints))


def check(ranks: list[list[dict[str, Any]]]) -> None:
    for rank in ranks:
        for found in rank:
            sizes = found["sizes"]
            assert found["transformer"]["off"] <= LIMIT, sizes
            assert found["text_encoder"]["off"] <= LIMIT, sizes
            assert max(found["latents"]) <= LIMIT, sizes
            _check_mechanism(sizes, found)


def _check_mechanism(sizes: dict[str, int], found: dict[str, Any]) -> None:
    """Something was sent by those who share the work, and it mattered."""
    sent = found["transformer"]["traffic"]
    blocks, forwards = 2, 4
    if "tp" in sizes:
        tp = sent["tp"]
        assert tp["all_reduce"] == 4 * blocks * forwards, "output projections of both streams"
        assert tp["all_gather"] == 2 * blocks * forwards, "modulations"
        assert found["transformer"]["unreduced"] > VISIBLE
    if "ulysses" in sizes:
        assert sent["ulysses"]["all_to_all"] == 2 * blocks * forwards
    expected = {"all_gather": 2 * STEPS} if "cfg" in sizes else {}
    assert found["branches"] == expected, "each rank has a branch, in both requests"
    if "ring" in sizes:
        rounds = sizes["ring"] - 1
        assert sent["ring"]["exchange"] == rounds * blocks * forwards
    if sizes.keys() & {"tp", "ulysses", "ring"}:
        assert found["text_encoder"]["unreduced"] > VISIBLE, "the encoder is spread over all ranks"


@pytest.mark.slow
def test_two_ranks(root: str, editing: str) -> None:
    check(run_ranks(2, _measure, root, editing, TWO, timeout=400))


@pytest.mark.slow
def test_four_ranks(root: str, editing: str) -> None:
    check(run_ranks(4, _measure, root, editing, FOUR, timeout=500))


def test_the_requests_differ(root: str) -> None:
    model = describe(root)
    pipeline = model.open_pipeline()
    whole = latents(model, pipeline, REQUEST)
    for change in ({"prompt": "two blue birds"}, {"negative_prompt": "zzz"}, {"seed": 6}):
        assert relative(latents(model, pipeline, {**REQUEST, **change}), whole) > VISIBLE
