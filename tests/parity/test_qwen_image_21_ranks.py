"""Qwen-Image 2.1 on two ranks against one: the latents of texts of two lengths, and of an edit."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from PIL import Image

from ranks import run_ranks
from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelLayout, ParallelState

from parity.harness import checkpoint_folder
from parity.test_qwen_image_edit import small_areas
from parity.test_qwen_image_ranks import LIMIT, TWO, VISIBLE, describe, latents, relative
from parity.tiny_qwen_image_21 import for_ranks

BLOCKS, STEPS = 2, 2
TEXTS: dict[str, Any] = {
    "prompt": ["a small red circle above the fox", "zzz"],
    "negative_prompt": "blue",
    "true_cfg_scale": 3.0,
    "seed": 5,
    "height": 96,
    "width": 160,
    "num_inference_steps": STEPS,
}


def _measure(_rank: int, path: str, picture: str) -> list[dict[str, Any]]:
    model = describe(path)
    requests = (TEXTS, {**TEXTS, "prompt": "make it blue", "image_path": [picture]})
    seen = []
    with small_areas():
        one = model.open_pipeline()
        expected = [latents(model, one, request) for request in requests]
        for sizes in TWO:
            parallel = ParallelState.create(ParallelLayout(**sizes), "cpu")
            many = model.open_pipeline(parallel=parallel)
            groups = [parallel.tp, parallel.ulysses, parallel.ring, parallel.cfg]
            for group in (*groups, *parallel.spreads):
                group.traffic.clear()
            off = [
                relative(latents(model, many, request), whole)
                for request, whole in zip(requests, expected, strict=True)
            ]
            found: dict[str, Any] = {"sizes": sizes, "off": off}
            found["traffic"] = {group.name: dict(group.traffic) for group in groups}
            if parallel.spreads:  # the encoder's sums, at least
                with patch.object(Group, "all_reduce", lambda _, x: x):
                    found["unreduced"] = relative(latents(model, many, TEXTS), expected[0])
            seen.append(found)
    return seen


@pytest.mark.slow
def test_two_ranks(checkpoints: Path, tmp_path: Path) -> None:
    root = checkpoint_folder(for_ranks(), checkpoints)
    picture = tmp_path / "picture.png"
    Image.effect_noise((90, 50), 90).convert("RGB").save(picture)
    for rank in run_ranks(2, _measure, str(root), str(picture), timeout=400):
        for found in rank:
            sizes, sent = found["sizes"], found["traffic"]
            assert max(found["off"]) <= LIMIT, found
            calls = 2 * 2 * STEPS * BLOCKS  # requests x branches x steps x blocks
            if "tp" in sizes:
                # Besides the steps: the prefixes of two prompts, a negative, and of the edit's two.
                assert sent["tp"]["all_reduce"] > 2 * calls + 2 * 5 * BLOCKS
            if "ulysses" in sizes:
                # Queries, then keys and values with the prefix's, and the way back.
                assert sent["ulysses"]["all_to_all"] == 3 * calls
            if "ring" in sizes:
                assert sent["ring"]["exchange"] == calls
            if "cfg" in sizes:
                assert sent["cfg"] == {"all_gather": 2 * STEPS}
            else:
                assert found["unreduced"] > VISIBLE, sizes
