"""Qwen-Image 2.1 against Diffusers' ``QwenImage21Pipeline``: of text, and of text and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from parity.harness import ParityCase, assert_parity
from parity.test_qwen_image_edit import small_areas
from parity.tiny_qwen_image_21 import TinyQwenImage21, family

SQUARE, ODD = (64, 64), (96, 160)
"""The latter in the language model's tokens: 3 x 5."""
SHAPES = {"wide": (90, 50), "tall": (40, 61), "other": (90, 50)}
GUIDED = {"negative_prompt": "a large blue square", "true_cfg_scale": 3.0}
ROWS: dict[str, dict[str, Any]] = {
    "text": {},
    "text, odd, guided": {"size": ODD, "request": {**GUIDED, "num_inference_steps": 3}},
    "text, guided by nothing": {
        "size": (128, 32),
        "request": {"negative_prompt": "", "true_cfg_scale": 2.0},
    },
    "prompts of one length, outputs": {
        "request": {
            **GUIDED,
            "prompt": ["a red fox", "a blue cat"],
            "num_outputs_per_prompt": 2,
        }
    },
    "a schedule of its own": {
        "checkpoint": TinyQwenImage21("qwen-image-21-sigmas", sample_sigmas=(1.0, 0.7, 0.2)),
        "request": {"num_inference_steps": 3},
    },
    "edit": {"pictures": ["wide"]},
    "edit, odd, guided": {"pictures": ["tall"], "size": ODD, "request": GUIDED},
    "edit of two": {"pictures": ["tall", "wide"], "request": GUIDED},
}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures with something in every corner, and partly transparent."""
    root = tmp_path_factory.mktemp("pictures")
    for index, (name, (width, height)) in enumerate(SHAPES.items()):
        generator = np.random.default_rng(index)
        coarse = Image.fromarray(generator.integers(0, 255, (4, 5, 4), dtype=np.uint8))
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(root / f"{name}.png")
    return root


def case(folder: Path, name: str) -> ParityCase:
    """A row by its name."""
    row = ROWS[name]
    height, width = row.get("size", SQUARE)
    pictures = [str(folder / f"{picture}.png") for picture in row.get("pictures", ())]
    other = [str(folder / "other.png"), *pictures[1:]]
    request: dict[str, Any] = {
        "prompt": "make the fox red",
        "seed": 5,
        "height": height,
        "width": width,
        "num_inference_steps": 2,
        **row.get("request", {}),
    }
    if pictures:
        request["image_path"] = pictures
    checkpoint = row.get("checkpoint", TinyQwenImage21())
    return ParityCase(name, checkpoint, family((height, width), lambda _: other), request)


@pytest.mark.parametrize("name", ROWS)
def test_parity(name: str, folder: Path, checkpoints: Path) -> None:
    with small_areas():
        print(assert_parity(case(folder, name), checkpoints))
