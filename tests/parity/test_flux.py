"""FLUX.1 dev and schnell against Diffusers' ``FluxPipeline``, from noise to stored image."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from parity.compare import compare
from parity.family import FLUX_DEV, FLUX_SCHNELL, Family
from parity.harness import ParityCase, assert_parity, checkpoint_folder
from parity.oracle import run_oracle
from parity.runtime_trace import opened_runtime, record_runtime
from parity.tiny_checkpoints import TinyFlux, flux_dev, flux_schnell

SQUARE, WIDE, TALL = (64, 64), (96, 128), (176, 80)
LONG = "a very long tale of " + ", ".join(f"fox {index} and owl {index}" for index in range(40))


def dev(name: str, size: tuple[int, int] = SQUARE, /, **request: Any) -> ParityCase:
    return _case(name, flux_dev(), FLUX_DEV, size, {"guidance_scale": 3.5, **request})


def schnell(name: str, size: tuple[int, int] = SQUARE, /, **request: Any) -> ParityCase:
    return _case(name, flux_schnell(), FLUX_SCHNELL, size, {"guidance_scale": 3.5, **request})


def stored(checkpoint: TinyFlux) -> ParityCase:
    request = {"negative_prompt": "green", "true_cfg_scale": 2.0}
    return _case(checkpoint.name, checkpoint, FLUX_DEV, SQUARE, request)


def guarded(case: ParityCase) -> ParityCase:
    """The same with stages that may only touch the fields they declare."""
    return replace(case, name=f"{case.name}, guarded", server={"check_stages": True})


def _case(
    name: str,
    checkpoint: TinyFlux,
    family: Family,
    size: tuple[int, int],
    request: dict[str, Any],
) -> ParityCase:
    height, width = size
    common = {
        "prompt": "a small red circle above the fox",
        "seed": 5,
        "height": height,
        "width": width,
        "num_inference_steps": 3,
        "max_sequence_length": 48,
    }
    return ParityCase(name, checkpoint, family, {**common, **request})


CASES = [
    dev("dev, square", SQUARE),
    dev("dev, wide", WIDE, num_inference_steps=4),
    dev("dev, tall", TALL),
    schnell("schnell, square", SQUARE),
    schnell("schnell, wide", WIDE, num_inference_steps=4),
    schnell("schnell, tall", TALL),
    dev("one step", num_inference_steps=1),
    dev("no embedded guidance", guidance_scale=0.0),
    # True CFG: the negative prompt is longer or shorter than the prompt, or empty.
    dev("true CFG", negative_prompt="a large blue square, cut off, with words", true_cfg_scale=4),
    dev("true CFG, empty negative", WIDE, negative_prompt="", true_cfg_scale=1.5),
    dev("true CFG off", negative_prompt="blue", true_cfg_scale=1.0),
    schnell("true CFG on schnell", TALL, negative_prompt="blue", true_cfg_scale=3.0),
    # Batches.
    dev("prompts", prompt=["a red fox", "the cat above a small blue square, sleeping", "zzz"]),
    dev("outputs", WIDE, num_outputs_per_prompt=3),
    dev(
        "prompts x outputs, true CFG",
        prompt=["a red fox", "the cat above a small blue square, sleeping"],
        num_outputs_per_prompt=2,
        negative_prompt="blue",
        true_cfg_scale=3.0,
    ),
    # Text.
    dev("text of 16 tokens", max_sequence_length=16, prompt="red fox"),
    dev("text of 512 tokens", max_sequence_length=512),
    dev("text cut by both encoders", prompt=LONG),
    dev("text outside the vocabulary", prompt="Ein ROTER Kreis, ☃ und  ネコ #2 ##", seed=0),
    guarded(dev("true CFG", negative_prompt="blue", true_cfg_scale=2.0)),
    # Checkpoints.
    stored(flux_dev("flux-bf16", dtype=torch.bfloat16)),
    stored(flux_dev("flux-fp16", dtype=torch.float16)),
    stored(flux_dev("flux-sharded", max_shard_size="40KB")),
    stored(flux_dev("flux-true-eos", clip_eos_token_id=None)),
    stored(flux_dev("flux-4-channels", latent_channels=4)),
    stored(
        flux_dev(
            "flux-other-shape",
            transformer={
                "num_layers": 1,
                "num_single_layers": 3,
                "num_attention_heads": 2,
                "attention_head_dim": 20,
                "axes_dims_rope": (8, 4, 8),
            },
        )
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(case: ParityCase, checkpoints: Path) -> None:
    print(assert_parity(case, checkpoints))


def test_stored_forms_are_what_they_claim(checkpoints: Path) -> None:
    """The rows on stored forms mean something: the files are of that dtype, and really sharded."""
    for case in CASES:
        assert isinstance(case.checkpoint, TinyFlux)
        root = checkpoint_folder(case.checkpoint, checkpoints)
        for file in root.rglob("*.safetensors"):
            with safe_open(file, "pt") as tensors:
                dtypes = {tensors.get_tensor(name).dtype for name in tensors.keys()}  # noqa: SIM118
            assert dtypes == {case.checkpoint.dtype}
    for part in ("text_encoder", "text_encoder_2", "transformer", "vae"):
        (index,) = (checkpoints / "flux-sharded" / part).glob("*.index.json")
        files = set(json.loads(index.read_text())["weight_map"].values())
        assert len(files) > 1


def test_no_request_leaves_a_trace_in_the_next(checkpoints: Path) -> None:
    """Other size, steps and guidance in between: the third run is the first one, bit for bit."""
    plain, between = dev("plain").request, dev("between", TALL, num_inference_steps=2).request
    between = {**between, "negative_prompt": "blue", "true_cfg_scale": 3.0}
    with opened_runtime(checkpoint_folder(flux_dev(), checkpoints)) as generator:
        first = record_runtime(generator, FLUX_DEV, plain)
        record_runtime(generator, FLUX_DEV, between)
        again = record_runtime(generator, FLUX_DEV, plain)
    assert {m.measured for m in compare(again, first).measurements} == {0.0}


def test_an_image_does_not_depend_on_its_batch(checkpoints: Path) -> None:
    """Output k is the single request with its seed, in one batch or in several."""
    request = dev("batch", num_outputs_per_prompt=3, num_inference_steps=2).request
    root = checkpoint_folder(flux_dev(), checkpoints)
    expected = run_oracle(root, FLUX_DEV, request)
    for size in (4, 2, 1):
        with opened_runtime(root, batching_max_size=size) as generator:
            batch = record_runtime(generator, FLUX_DEV, request)
            assert not compare(batch, expected).broken, f"batching_max_size={size}"
    singles = {**request, "num_outputs_per_prompt": 1}
    for index, image in enumerate(expected.images):
        single = run_oracle(root, FLUX_DEV, {**singles, "seed": singles["seed"] + index})
        assert (single.images[0].int() - image.int()).abs().max() <= 1
