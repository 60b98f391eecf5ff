"""``sglang generate`` with a model that makes videos: the toy family, loaded for real."""

from __future__ import annotations

import json
import re
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from sglang.multimodal_gen import DiffGenerator, GeneratedVideo
from sglang.multimodal_gen.runtime.utils import video_file
from sglang.multimodal_gen.runtime.utils.errors import OutputError, UserError
from sglang.multimodal_gen.runtime.utils.image_file import read_metadata
from sglang.multimodal_gen.runtime.utils.video_file import read_video_metadata

import toy_clips  # noqa: F401
from toy_clips.checkpoint import write_checkpoint

SMALL = ("--num-frames", "5", "--height", "32", "--width", "48", "--num-inference-steps", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("toy") / "toy-clips")


@pytest.fixture
def make(sglang, model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*argv: str):
        return sglang("generate", "--model-path", str(model), "--device", "cpu", "--quiet",
                      "--prompt", "a red ball", "--seed", "7", *SMALL, *argv)  # fmt: skip

    return run


def frames_of(path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])


def test_a_clip_is_written_and_its_path_printed(make):
    outcome = make()
    assert outcome.code == 0, outcome.err
    path = Path(outcome.out.rstrip("\n"))
    assert re.fullmatch(r"outputs/\d{8}-\d{6}-7\.mp4", str(path))
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.frames, stream.average_rate) == (5, 8)
        assert (stream.width, stream.height) == (48, 32)
    about = read_video_metadata(path)
    assert (about.prompt, about.seed, about.parameters["num_frames"]) == ("a red ball", 7, 5)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    without = make("--no-save-metadata", "--output-path", "b.mp4").out.strip()
    assert read_video_metadata(without) is None


def test_json_tells_frames_and_rate(make):
    summary = json.loads(make("--json", "--fps", "24", "--num-outputs-per-prompt", "2").out)
    assert "images" not in summary
    videos = summary["videos"]
    paths = [Path(video.pop("path")) for video in videos]
    assert videos == [
        {"prompt": "a red ball", "seed": seed, "width": 48, "height": 32, "num_frames": 5,
         "fps": 24} for seed in (7, 8)
    ]  # fmt: skip
    assert np.abs(frames_of(paths[0]).astype(int) - frames_of(paths[1])).mean() > 1


def test_names_and_overwriting_are_as_for_pictures(make):
    Path("a.mp4").write_bytes(b"precious")
    assert make("--output-path", "a.mp4").out == "a-2.mp4\n"
    assert Path("a.mp4").read_bytes() == b"precious"
    assert make("--output-path", "a.mp4", "--overwrite").out == "a.mp4\n"
    assert len(frames_of("a.mp4")) == 5
    assert make("--output-path", "there", "--output-file-name", "v1.5").out == "there/v1.5.mp4\n"
    several = make("--output-file-name", "b", "--num-outputs-per-prompt", "2").out.split()
    assert several == ["outputs/b.mp4", "outputs/b-2.mp4"]


@pytest.mark.parametrize(("name", "kind"), [("a.gif", "GIF"), ("a.webp", "WEBP")])
def test_other_formats(make, name, kind):
    assert make("--output-path", name).code == 0
    with Image.open(name) as image:
        assert (image.format, image.n_frames, image.size) == (kind, 5, (48, 32))
    assert read_video_metadata(name).seed == 7


def test_frames_are_a_folder_of_png_files(make):
    folder = Path(make("--frames").out.strip())
    assert re.fullmatch(r"outputs/\d{8}-\d{6}-7", str(folder))
    assert sorted(p.name for p in folder.iterdir()) == [f"{k:05}.png" for k in range(5)]
    assert read_metadata(folder / "00000.png").seed == 7
    frames = np.stack([np.asarray(Image.open(p)) for p in sorted(folder.iterdir())])
    clip = frames_of(make().out.strip())
    assert np.abs(frames.astype(int) - clip).mean() < 3
    for expected in ("x/f", "x/f-2"):
        assert make("--frames", "--output-path", "x", "--output-file-name", "f").out.strip() == (
            expected
        )
    assert sorted(p.name for p in Path("x").iterdir()) == ["f", "f-2"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--num-frames", "6"), "num_frames=6: must be a multiple of 4 and one more"),
        (("--fps", "0"), "fps=0: must be at least 1"),
        (("--output-path", "a.png"), "'.png' is no video format that can be written"),
        (("--output-path", "a.mov"), "'.mov' is no video format that can be written"),
        (("--output-path", "a.mp4", "--num-outputs-per-prompt", "2"), "2 videos are asked for"),
        (("--output-path", "a.mp4", "--frames"), "but --frames makes folders"),
        (("--output-path", "a.gif", "--fps", "60"), "a GIF plays at most 50"),
        (("--num-frames", "99997", "--height", "64"), "num_frames*height*width"),
    ],
)
def test_mistakes_end_before_a_weight_is_loaded(make, monkeypatch, argv, words):
    from sglang.multimodal_gen.runtime.entrypoints import diffusion_generator

    def load(*_, **__):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(diffusion_generator, "open_worker", load)
    outcome = make(*argv)
    assert outcome.code == 2
    assert words in outcome.err, outcome.err
    assert "Traceback" not in outcome.err


def test_a_missing_extra_is_told_before_a_weight_is_loaded(make, monkeypatch):
    monkeypatch.setattr(video_file.importlib.util, "find_spec", lambda name: None)
    outcome = make()
    assert outcome.code == 2
    assert "pip install 'sglang-diffusion[video]'" in outcome.err
    assert make("--frames").code == 0  # needs none
    assert make("--output-path", "a.webp").code == 0


def test_frames_of_pictures_are_refused(generator, fails):
    assert "frames=True: is for videos" in fails("generate", "--prompt", "x", "--frames")
    assert "'.mp4' is no image format" in fails(
        "generate", "--prompt", "x", "--output-path", "a.mp4"
    )


def test_from_python(model, tmp_path):
    values = {"prompt": ["a", "b"], "seed": 1, "num_frames": 9, "height": 32, "width": 48}
    with DiffGenerator.from_pretrained(str(model), device="cpu") as generator:
        result = generator.generate(values)
    assert (result.images, len(result), len(result.videos)) == ([], 2, 2)
    video = result[1]
    assert isinstance(video, GeneratedVideo)
    assert (video.frames.shape, video.frames.dtype) == ((9, 32, 48, 3), np.uint8)
    assert (video.fps, video.seconds, video.prompt, video.seed) == (8, 9 / 8, "b", 2)
    assert [p.suffix for p in result.save(tmp_path / "out")] == [".mp4", ".mp4"]
    folders = result.save(tmp_path / "frames", frames=True)
    assert [len(list(folder.iterdir())) for folder in folders] == [9, 9]
    assert np.array_equal(np.asarray(Image.open(folders[0] / "00003.png")), result[0].frames[3])
    with pytest.raises(OutputError, match="names one file, but 2 videos"):
        result.save(tmp_path / "x.mp4")
    with pytest.raises(OutputError, match="no video format"):
        result.save(tmp_path / "x.png")


def test_a_full_disk_leaves_nothing(model, tmp_path, monkeypatch):
    with DiffGenerator.from_pretrained(str(model), device="cpu") as generator:
        result = generator.generate(prompt="x", num_frames=1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    for options in ({}, {"frames": True}):
        with pytest.raises(UserError, match="No space left"):
            result.save(tmp_path / "out", **options)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
