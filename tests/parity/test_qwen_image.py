"""Qwen-Image against Diffusers' ``QwenImagePipeline``, from noise to stored image."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.multimodal_gen.runtime.verify.measure import largest_difference

from parity.compare import compare
from parity.harness import ParityCase, assert_parity, checkpoint_folder
from parity.oracle import run_oracle
from parity.runtime_trace import opened_runtime, record_runtime
from parity.tiny_qwen_image import QWEN_IMAGE, TinyQwenImage, qwen_image

SQUARE, WIDE, TALL, ODD = (64, 64), (96, 128), (176, 80), (112, 80)
"""The latter in tokens: 7 x 5."""


def row(
    name: str,
    size: tuple[int, int] = SQUARE,
    /,
    checkpoint: TinyQwenImage | None = None,
    **request: Any,
) -> ParityCase:
    height, width = size
    common = {
        "prompt": "a small red circle above the fox",
        "negative_prompt": " ",
        "true_cfg_scale": 1.0,
        "seed": 5,
        "height": height,
        "width": width,
        "num_inference_steps": 3,
    }
    return ParityCase(
        name, qwen_image() if checkpoint is None else checkpoint, QWEN_IMAGE, {**common, **request}
    )


GUIDED = {"negative_prompt": "a large blue square, cut off, with words", "true_cfg_scale": 4.0}
CASES = [
    row("square"),
    row("wide", WIDE, num_inference_steps=4),
    row("tall", TALL),
    row("odd counts of tokens", ODD, **GUIDED),
    row("two steps", num_inference_steps=2),
    row("guided", **GUIDED),
    row("guided, blank negative", WIDE, true_cfg_scale=1.5),
    row("guided, empty negative", TALL, true_cfg_scale=4.0, negative_prompt=""),
    row("prompts of one length", prompt=["a red fox", "a blue cat"], **GUIDED),
    row("prompts", prompt=["a red fox", "the cat above a small blue square, sleeping", "zzz"]),
    row("outputs, guided", ODD, num_outputs_per_prompt=2, **GUIDED),
    row("text cut", prompt="a red fox and " * 20, max_sequence_length=30, **GUIDED),
    row("text outside the vocabulary", prompt="Ein ROTER Kreis, ☃ {} ネコ #2 ##", seed=0),
    row("bf16 file", checkpoint=qwen_image("qwen-image-bf16", dtype=torch.bfloat16), **GUIDED),
    row(
        "no shift",
        checkpoint=qwen_image("qwen-image-static", scheduler={"use_dynamic_shifting": False}),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(case: ParityCase, checkpoints: Path) -> None:
    print(assert_parity(case, checkpoints))


def test_outputs_of_prompts_that_differ_in_length_have_their_own_masks(checkpoints: Path) -> None:
    """The reference repeats embeddings prompt by prompt, and masks the other way round.

    So it is asked for each output by itself: that is what ours makes of both together.
    """
    root = checkpoint_folder(qwen_image(), checkpoints)
    prompts = ["a red fox", "the cat above a small blue square, sleeping"]
    request = row("", ODD, prompt=prompts, **GUIDED).request
    with opened_runtime(root) as generator:
        ours = record_runtime(generator, QWEN_IMAGE, {**request, "num_outputs_per_prompt": 2})
    each = [prompt for prompt in prompts for _ in range(2)]
    expected = run_oracle(root, QWEN_IMAGE, {**request, "prompt": each})
    assert not compare(ours, expected).broken
    swapped = run_oracle(root, QWEN_IMAGE, {**request, "num_outputs_per_prompt": 2})
    assert compare(ours, swapped).worst("step 0, positive: input encoder_hidden_states_mask") > 0.1


def test_the_layout_that_was_published_is_read(checkpoints: Path, tmp_path: Path) -> None:
    """A flat config as Transformers 4 wrote it, names of 4 and 5, and a width that nothing has."""
    plain, old = checkpoint_folder(qwen_image(), checkpoints), tmp_path / "old"
    shutil.copytree(plain, old)
    encoder = old / "text_encoder"
    tensors = load_file(encoder / "model.safetensors")
    assert {"visual.merger.ln_q.weight", "model.norm.weight"} <= tensors.keys()
    renamed = {
        f"model.{name}"
        if name.startswith("visual.")
        else re.sub(r"^model\.", "model.language_model.", name): tensor
        for name, tensor in tensors.items()
    }
    assert "model.language_model.norm.weight" in renamed
    save_file(renamed, encoder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((encoder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"mrope_section": rope["mrope_section"], "rope_type": "default", "type": "default"}
    flat = {**text, **config, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    (encoder / "config.json").write_text(json.dumps(flat))
    denoiser = json.loads((old / "transformer" / "config.json").read_text())
    denoiser["pooled_projection_dim"] = 768
    (old / "transformer" / "config.json").write_text(json.dumps(denoiser))
    pixels = []
    for root in (plain, old):
        with opened_runtime(root) as generator:
            pixels.append(record_runtime(generator, QWEN_IMAGE, row("", **GUIDED).request).pixels)
    assert torch.equal(*pixels)


def test_one_step_is_a_step(checkpoints: Path) -> None:
    """The reference divides zero by zero here; a server warms itself up with one step."""
    with opened_runtime(checkpoint_folder(qwen_image(), checkpoints)) as generator:
        one = record_runtime(generator, QWEN_IMAGE, row("", num_inference_steps=1).request)
        two = record_runtime(generator, QWEN_IMAGE, row("", num_inference_steps=2).request)
    assert one.sigmas.tolist() == [1.0]
    assert two.sigmas.tolist() == pytest.approx([1.0, 0.02])
    assert largest_difference(one.pixels, two.pixels) > 1 / 255


def test_a_single_prompt_pays_for_no_mask_and_no_padding(checkpoints: Path) -> None:
    root = checkpoint_folder(qwen_image(), checkpoints)
    one = row("", **GUIDED).request
    several = {**one, "prompt": [one["prompt"], "zzz"]}
    with opened_runtime(root) as generator:
        alone = record_runtime(generator, QWEN_IMAGE, one)
        batch = record_runtime(generator, QWEN_IMAGE, several)
    mask = "encoder_hidden_states_mask"
    assert all(mask not in branch.inputs for branch in alone.steps[0].branches)
    assert batch.steps[0].branches[0].inputs[mask].sum(1).tolist() == [17, 13]
    assert largest_difference(batch.pixels[:1], alone.pixels) < 1e-4
