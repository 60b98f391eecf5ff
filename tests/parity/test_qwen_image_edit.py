"""Qwen-Image-Edit and Edit-Plus against Diffusers' pipelines, with pictures of several shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from diffusers.pipelines.qwenimage21 import pipeline_qwenimage21
from PIL import Image

from sglang.multimodal_gen.configs.picture_area import PictureArea

from parity.compare import compare
from parity.harness import ParityCase, assert_parity, checkpoint_folder
from parity.oracle import run_oracle
from parity.runtime_trace import opened_runtime, record_runtime
from parity.tiny_qwen_image import TinyQwenImage, editing, qwen_image

SQUARE, ODD = (64, 64), (112, 80)
SHAPES = {"wide": (90, 50), "tall": (40, 61), "other": (90, 50)}
EDIT, PLUS = "QwenImageEditPipeline", "QwenImageEditPlusPipeline"


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures with something in every corner."""
    root = tmp_path_factory.mktemp("pictures")
    for index, (name, (width, height)) in enumerate(SHAPES.items()):
        generator = np.random.default_rng(index)
        coarse = Image.fromarray(generator.integers(0, 255, (4, 5, 3), dtype=np.uint8))
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(root / f"{name}.png")
    return root


def edited(folder: Path, name: str) -> ParityCase:
    """A row by its name."""
    row = ROWS[name]
    height, width = row.get("size", SQUARE)
    pictures = [str(folder / f"{picture}.png") for picture in row["pictures"]]
    other = [str(folder / "other.png"), *pictures[1:]]
    one = row["pipeline"] == EDIT
    family = editing(row["pipeline"], (height, width), lambda _: other[0] if one else other)
    checkpoint: TinyQwenImage = qwen_image(
        f"{row['pipeline']}{row.get('transformer', '')}",
        pipeline=row["pipeline"],
        transformer=row.get("transformer", {}),
    )
    request: dict[str, Any] = {
        "prompt": "make the fox red",
        "negative_prompt": " ",
        "true_cfg_scale": 1.0,
        "seed": 5,
        "height": height,
        "width": width,
        "num_inference_steps": 2,
        "image_path": pictures[0] if one else pictures,
    }
    return ParityCase(name, checkpoint, family, {**request, **row.get("request", {})})


GUIDED = {"negative_prompt": "a large blue square", "true_cfg_scale": 3.0}
ROWS: dict[str, dict[str, Any]] = {
    "edit": {"pipeline": EDIT, "pictures": ["wide"]},
    "edit, odd, guided": {"pipeline": EDIT, "pictures": ["tall"], "size": ODD, "request": GUIDED},
    "plus, one picture, guided": {"pipeline": PLUS, "pictures": ["tall"], "request": GUIDED},
    "plus, two pictures, odd": {"pipeline": PLUS, "pictures": ["tall", "wide"], "size": ODD},
    "plus, references at time 0": {
        "pipeline": PLUS,
        "pictures": ["wide", "tall"],
        "transformer": {"zero_cond_t": True},
        "request": GUIDED,
    },
}


@contextmanager
def small_areas(divisor: int = 64) -> Iterator[None]:
    """Both sides make pictures of an 8th of the published edges: seconds in place of minutes."""
    with ExitStack() as stack:
        for module in (
            pipeline_qwenimage_edit,
            pipeline_qwenimage_edit_plus,
            pipeline_qwenimage21,
        ):
            rule = module.calculate_dimensions
            smaller = lambda area, ratio, rule=rule: rule(area // divisor, ratio)  # noqa: E731
            stack.enter_context(patch.object(module, "calculate_dimensions", smaller))
        size_for = PictureArea.size_for

        def smaller_size(self: PictureArea, width: int, height: int) -> tuple[int, int]:
            return size_for(PictureArea(self.pixels // divisor, self.multiple), width, height)

        stack.enter_context(patch.object(PictureArea, "size_for", smaller_size))
        yield


@pytest.mark.parametrize("name", ROWS)
def test_parity(name: str, folder: Path, checkpoints: Path) -> None:
    with small_areas():
        print(assert_parity(edited(folder, name), checkpoints))


@pytest.mark.slow
def test_parity_at_the_published_areas(folder: Path, checkpoints: Path) -> None:
    case = edited(folder, "plus, one picture, guided")
    root = checkpoint_folder(case.checkpoint, checkpoints)
    expected = run_oracle(root, case.family, case.request)
    with opened_runtime(root) as generator:
        measured = record_runtime(generator, case.family, case.request)
    inputs = expected.steps[0].branches[0].inputs
    assert inputs["hidden_states"].shape[1] == 16 + 52 * 80, "832 x 1280 pixels, in tokens"
    assert not compare(measured, expected).broken
