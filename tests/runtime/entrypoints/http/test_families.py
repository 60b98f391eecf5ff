"""The published families behind the routes: what comes back is what the Python door gives."""

from __future__ import annotations

import base64
import contextlib
import io
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from runtime.entrypoints.http.conftest import FLAGS, Live, picture, running
from runtime.entrypoints.http.test_videos import content, frames_of
from runtime.entrypoints.http.video_server import describe, until
from sglang.multimodal_gen.runtime.entrypoints.diffusion_generator import DiffGenerator
from sglang.multimodal_gen.runtime.entrypoints.http.opening import service_of
from sglang.multimodal_gen.runtime.managers.worker import Worker
from sglang.multimodal_gen.runtime.server_args.serving import ServingArgs
from sglang.multimodal_gen.runtime.utils.video_file import encode_video

from parity.test_qwen_image_edit import small_areas
from parity.tiny_qwen_image import qwen_image
from parity.tiny_wan import TinyWan

SIZE = (64, 48)


@contextlib.contextmanager
def serving(checkpoint, folder: Path) -> Iterator[tuple[Live, DiffGenerator]]:
    """A server of a tiny checkpoint, and the same model behind the Python door."""
    checkpoint.write(folder)
    model = describe(folder)
    flags = ServingArgs.from_flat(**FLAGS)
    with (
        DiffGenerator.from_pretrained(
            model_path=str(folder), device="cpu", precision="fp32"
        ) as generator,
        running(
            lambda kept: service_of(model, Worker(model), flags, kept), flags, None
        ) as live,
    ):  # fmt: skip
        while live.context.lifecycle.phase == "loading":
            time.sleep(0.005)
        yield live, generator


def pixels(response) -> np.ndarray:
    (image,) = response.data
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(image.b64_json))))


@pytest.mark.parametrize("image", ["", "clip"], ids=["text", "first frame"])
def test_wan_makes_videos(tmp_path, image):
    body = {"prompt": "a fox runs", "num_frames": 5, "num_inference_steps": 2, "seed": 3,
            "guidance_scale": 3.0, "negative_prompt": "blue"}  # fmt: skip
    with serving(TinyWan("wan", image=image), tmp_path / "wan") as (live, generator):
        given = {}
        if image:
            (tmp_path / "first.png").write_bytes(picture(SIZE))
            given = {"image_path": str(tmp_path / "first.png")}
            body["input_reference"] = {
                "image_url": "data:image/png;base64," + base64.b64encode(picture(SIZE)).decode()
            }
        video = live.http.post("/v1/videos", json=body | {"size": "64x48"}).json()
        done = until(live, video["id"], seconds=60.0)
        assert done["status"] == "completed", done
        clip = frames_of(content(live, video["id"]))
        settings = {k: v for k, v in body.items() if k != "input_reference"} | given
        expected, other = (
            generator.generate(width=64, height=48, **settings | {"seed": seed}).videos[0]
            for seed in (3, 4)
        )
    # The frames were equal to the bit in each of 24 runs that looked; x264 gives other bytes of
    # the same frames now and then.
    near, far = (frames_of(encode_video(each.frames, each.fps)) for each in (expected, other))
    assert clip.shape == (5, 48, 64, 3)
    near, far = (np.abs(clip.astype(int) - each).mean() for each in (near, far))
    assert near < 2 < 4 < far


def test_qwen_image_makes_pictures(tmp_path):
    settings = {"prompt": "a red fox", "num_inference_steps": 2, "seed": 3,
                "negative_prompt": "blue", "true_cfg_scale": 3.0}  # fmt: skip
    with serving(qwen_image(), tmp_path / "qwen") as (live, generator):
        extra = {k: v for k, v in settings.items() if k != "prompt"}
        made = live.openai().images.generate(prompt="a red fox", size="64x48", extra_body=extra)
        expected = generator.generate(width=64, height=48, **settings).images[0].array
    assert np.array_equal(pixels(made), expected)


def test_qwen_image_edits_several_pictures(tmp_path):
    files = []
    for name, colour in (("one", (200, 30, 40)), ("two", (20, 60, 220))):
        path = tmp_path / f"{name}.png"
        path.write_bytes(picture(SIZE, colour))
        files.append(path)
    settings = {"num_inference_steps": 2, "seed": 3, "true_cfg_scale": 1.0}
    checkpoint = qwen_image("edit-plus", pipeline="QwenImageEditPlusPipeline")
    with small_areas(), serving(checkpoint, tmp_path / "qwen") as (live, generator):
        made = [
            pixels(
                live.openai().images.edit(
                    image=chosen, prompt="put both on a table", extra_body=settings
                )
            )
            for chosen in (files, files[::-1])
        ]
        expected = generator.generate(
            prompt="put both on a table", image_path=[str(file) for file in files], **settings
        )
    assert np.array_equal(made[0], expected.images[0].array)
    assert not np.array_equal(*made), "the order of the pictures counts"
