"""Wan 2.1 and 2.2 against Diffusers' pipelines, from noise to stored clips."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.wan.pipeline_wan import WanPipeline
from PIL import Image

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.utils.video_file import encode_video

from parity.compare import compare
from parity.family import Family
from parity.harness import ParityCase, assert_parity, checkpoint_folder
from parity.oracle import trace_of
from parity.runtime_trace import opened_runtime, record_runtime
from parity.tiny_wan import TinyWan
from parity.wan_families import (
    EXPERTS,
    IMAGE,
    IMAGE_EXPERTS,
    SMALL_IMAGE,
    SMALL_TEXT,
    TEXT,
    VIDEO,
    mirrored,
)

WIDE, TALL = (48, 80), (64, 32)
FIRST, LAST, CLIP = "given-first.png", "given-last.png", "given-clip.mp4"
MESSY = "  a &amp;lt;small&amp;gt; red\n\n circle, the foxâ€™s  "


def _case(
    name: str,
    checkpoint: TinyWan,
    family: Family,
    size: tuple[int, int] = WIDE,
    /,
    **request: Any,
) -> ParityCase:
    height, width = size
    common = {
        "prompt": "a small red circle above the fox",
        "negative_prompt": "blue square",
        "seed": 5,
        "height": height,
        "width": width,
        "num_frames": 9,
        "num_inference_steps": 4,
        "guidance_scale": 3.0,
    }
    return ParityCase(name, checkpoint, family, {**common, **request})


def text(name: str, size: tuple[int, int] = WIDE, /, **request: Any) -> ParityCase:
    return _case(name, TinyWan("wan"), TEXT, size, **request)


def experts(name: str, size: tuple[int, int] = WIDE, /, **request: Any) -> ParityCase:
    return _case(name, TinyWan("wan-2.2", experts=True), EXPERTS, size, **request)


def small(name: str, size: tuple[int, int], family: Family, /, **request: Any) -> ParityCase:
    return _case(name, TinyWan("wan-5b", image="first"), family, size, **request)


def image(name: str, kind: str, size: tuple[int, int] = WIDE, /, **request: Any) -> ParityCase:
    return _case(name, TinyWan(f"wan-{kind}", image=kind), IMAGE, size, **request)


def euler(name: str, **request: Any) -> ParityCase:
    return _case(name, TinyWan("wan-euler", scheduler={"shift": 5.0}), TEXT, **request)


def guarded(case: ParityCase) -> ParityCase:
    """The same with stages that may only touch the fields they declare."""
    return replace(case, name=f"{case.name}, guarded", server={"check_stages": True})


A14B = TinyWan("wan-2.2-image", image="channels", experts=True, boundary_ratio=0.9)
CASES = [
    # 2.1, text to video.
    text("text, wide"),
    text("text, tall", TALL, num_frames=5, num_inference_steps=6),
    text("one frame", (48, 48), num_frames=1),
    text("one step", TALL, num_inference_steps=1),
    text("no guidance", guidance_scale=1.0),
    text("empty negative prompt", TALL, negative_prompt="", num_frames=5),
    text("a prompt to clean", TALL, prompt=MESSY, negative_prompt="&quot;blue  &quot;"),
    text("a shift", TALL, flow_shift=7.0),
    text("prompts", TALL, prompt=["a red fox", "the cat above a small blue square, asleep"]),
    text("outputs", TALL, num_outputs_per_prompt=2, num_frames=5),
    euler("euler", num_frames=5),
    euler("euler, shifted", flow_shift=2.0, num_frames=5),
    guarded(text("text", TALL, num_frames=5)),
    _case(
        "no norm before text",
        TinyWan("wan-other-shape", transformer={"cross_attn_norm": False, "num_layers": 1}),
        TEXT,
        TALL,
    ),
    # 2.1, video to video.
    _case("video", TinyWan("wan"), VIDEO, TALL, video_path=CLIP, strength=0.8),
    _case("half of a video", TinyWan("wan"), VIDEO, WIDE, video_path=CLIP, strength=0.5),
    guarded(_case("video", TinyWan("wan"), VIDEO, TALL, video_path=CLIP, strength=0.5)),
    # 2.2, two experts.
    experts("experts, wide", guidance_scale_2=2.0),
    experts("experts, tall", TALL, num_frames=5, guidance_scale_2=5.0, num_inference_steps=6),
    experts("one guidance for both", TALL),
    # 2.2, the 5B.
    small("5B, text", (64, 96), SMALL_TEXT),
    small("5B, text, tall", (96, 32), SMALL_TEXT, num_frames=5),
    small("5B, first frame", (64, 96), SMALL_IMAGE, image_path=FIRST),
    small("5B, first frame, tall", (96, 32), SMALL_IMAGE, num_frames=5, image_path=FIRST),
    guarded(small("5B, first frame", (64, 32), SMALL_IMAGE, image_path=FIRST)),
    # 2.1, image to video; first and last frame.
    image("image", "clip", image_path=FIRST),
    image("image, tall", "clip", TALL, num_frames=5, image_path=FIRST),
    image("image, no guidance", "clip", TALL, guidance_scale=1.0, image_path=FIRST),
    image("image, prompts", "clip", TALL, prompt=["a fox", "zzz"], image_path=FIRST),
    guarded(image("image", "clip", TALL, image_path=FIRST)),
    image("first and last", "both", image_path=[FIRST, LAST]),
    image("first and last, tall", "both", TALL, num_frames=5, image_path=[FIRST, LAST]),
    # 2.2, image to video: two experts, no CLIP.
    _case("A14B", A14B, IMAGE_EXPERTS, image_path=FIRST, guidance_scale_2=2.0),
    _case("A14B, last frame too", A14B, IMAGE_EXPERTS, TALL, image_path=[FIRST, LAST]),
]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pictures and a clip of another size than the request's, and others beside them."""
    folder = tmp_path_factory.mktemp("given")
    rng = np.random.default_rng(3)
    for name in (FIRST, LAST):
        blocks = rng.integers(0, 256, (5, 4, 3), dtype=np.uint8)
        picture = Image.fromarray(blocks).resize((90, 70), Image.Resampling.BICUBIC)
        picture.save(folder / name)
        mirrored(picture).save(folder / name.replace("given-", "other-"))
    for name in (CLIP, CLIP.replace("given-", "other-")):
        blocks = rng.integers(0, 256, (11, 5, 4, 3), dtype=np.uint8)
        frames = np.stack(
            [
                np.asarray(Image.fromarray(b).resize((64, 48), Image.Resampling.BICUBIC))
                for b in blocks
            ]
        )
        (folder / name).write_bytes(encode_video(frames, 8))
    return folder


def placed(case: ParityCase, files: Path) -> ParityCase:
    """The case with its files where they are."""
    request = dict(case.request)
    for name in ("image_path", "video_path"):
        given = request.get(name)
        if given is not None:
            several = isinstance(given, list)
            request[name] = [str(files / g) for g in given] if several else str(files / given)
    return replace(case, request=request)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(case: ParityCase, checkpoints: Path, files: Path) -> None:
    print(assert_parity(placed(case, files), checkpoints))


def test_no_request_leaves_a_trace_in_the_next(checkpoints: Path, files: Path) -> None:
    """Text, a first frame, a clip on one pipeline: the last run is the first one, bit for bit."""
    plain = small("text", (64, 32), SMALL_TEXT).request
    between = [
        small("image", (96, 32), SMALL_IMAGE, image_path=FIRST, num_frames=5),
        small("clip", (64, 64), SMALL_TEXT, video_path=CLIP, flow_shift=5.0),
    ]
    root = checkpoint_folder(TinyWan("wan-5b", image="first"), checkpoints)
    with opened_runtime(root) as generator:
        first = record_runtime(generator, SMALL_TEXT, plain)
        for case in between:
            record_runtime(generator, replace(SMALL_TEXT, inputs=("hidden_states",)),
                           placed(case, files).request)  # fmt: skip
        again = record_runtime(generator, SMALL_TEXT, plain)
    assert {m.measured for m in compare(again, first).measurements} == {0.0}


def test_in_bfloat16_a_forward_is_off_by_a_rounding_or_not_at_all(checkpoints: Path) -> None:
    """With the precisions that the family chooses: denoiser and encoder bf16, autoencoder fp32."""
    request = text("bf16", TALL).request
    root = checkpoint_folder(TinyWan("wan"), checkpoints)
    dtypes = {"default": torch.bfloat16, "vae": torch.float32}
    pipeline = WanPipeline.from_pretrained(root, dtype=dtypes)
    pipeline.set_progress_bar_config(disable=True)
    expected = trace_of(pipeline, TEXT, request)
    with DiffGenerator.from_pretrained(
        model_path=str(root), device="cpu", precision="config"
    ) as generator:
        measured = record_runtime(generator, TEXT, request)
    assert measured.steps[0].branches[0].prediction.dtype == torch.bfloat16
    report = compare(measured, expected)
    # All that goes into the first forward, bit for bit; a flipped rounding then grows in the loop.
    first = [m for m in report.measurements if m.what.startswith("step 0")]
    off = {m.what: m.measured for m in first if "prediction" not in m.what}
    assert set(off.values()) == {0.0}, f"\n{report}"
    assert max(m.measured for m in first) < 1e-3, f"\n{report}"
    assert report.worst("final latents") < 0.03, f"\n{report}"
