"""``sglang generate`` with Wan in miniature, from a shell's arguments to an MP4 file."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from sglang.multimodal_gen.runtime.entrypoints.cli.main import main
from sglang.multimodal_gen.runtime.utils.video_file import load_input_video

from parity.tiny_wan import TinyWan

SIZE = ("--height", "64", "--width", "64", "--num-frames", "9", "--num-inference-steps", "2")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan") / "tiny-5b"
    TinyWan("wan-5b", image="first").write(folder)
    return str(folder)


def generated(root, out, *more):
    model = ("--model-path", root, "--precision", "fp32", "--device", "cpu")
    shown = ("--prompt", "a red fox", "--seed", "5", "--output-path", str(out))
    assert main(["generate", *model, *shown, *SIZE, *more]) == 0
    return load_input_video(out)


def test_text_an_image_and_a_clip_each_make_a_clip(root, tmp_path):
    """One checkpoint, three tasks; the schedule's shift, and a rate of the caller's."""
    from_text = generated(root, tmp_path / "text.mp4", "--fps", "12")
    assert from_text.frames.shape == (9, 64, 64, 3)
    assert from_text.fps == 12
    shifted = generated(root, tmp_path / "shifted.mp4", "--flow-shift", "9")
    assert shifted.fps == 16
    Image.fromarray(from_text.frames[0][:, ::-1]).save(tmp_path / "first.png")
    from_image = generated(
        root, tmp_path / "image.mp4", "--image-path", str(tmp_path / "first.png")
    )
    from_clip = generated(
        root, tmp_path / "clip.mp4",
        "--video-path", str(tmp_path / "text.mp4"), "--strength", "0.5",
    )  # fmt: skip
    clips = [c.frames.astype(int) for c in (from_text, shifted, from_image, from_clip)]
    for index, clip in enumerate(clips):
        assert np.ptp(clip) > 100
        assert all(np.abs(clip - other).mean() > 3 for other in clips[:index])
