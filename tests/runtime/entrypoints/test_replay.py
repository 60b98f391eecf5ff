from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from sglang.multimodal_gen.runtime.entrypoints import diffusion_generator
from sglang.multimodal_gen.runtime.entrypoints.cli.main import main
from sglang.multimodal_gen.runtime.entrypoints.replay import (
    CannotReplay,
    Recipe,
    _read_video,
    compare,
)
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest, ModelNotFound
from sglang.multimodal_gen.runtime.utils.image_file import ImageMetadata, encode_image

ARRAY = np.random.default_rng(1).integers(0, 256, (24, 40, 3), dtype=np.uint8)
SETTINGS = {"num_inference_steps": 2, "width": 40, "height": 24, "num_outputs_per_prompt": 4}


def about(model="demo", **parameters) -> ImageMetadata:
    return ImageMetadata("a fox", 7, model, SETTINGS | parameters)


def written(path: Path, array=ARRAY, quality=95, **parameters) -> Path:
    kind = {".png": "PNG", ".jpg": "JPEG", ".webp": "WEBP"}[path.suffix]
    path.write_bytes(encode_image(array, kind, quality=quality, metadata=about(**parameters)))
    return path


class Fake:
    """A generator that makes one array, and keeps what it was asked."""

    def __init__(self, array=ARRAY, error=None) -> None:
        self.array, self.error, self.asked, self.model = array, error, {}, None

    def from_server_args(self, args):
        self.model = args.model.model_path
        if self.model == "gone":
            raise ModelNotFound("nothing there")
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass

    def generate(self, **settings):
        self.asked = settings
        if self.error is not None:
            raise self.error
        return FakeResult([SimpleNamespace(array=self.array)])


class FakeResult(list):
    warnings = ()


@pytest.fixture
def fake(monkeypatch):
    made = Fake()
    monkeypatch.setattr(diffusion_generator, "DiffGenerator", made)
    return made


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
@pytest.mark.parametrize("quality", [95, 60])
def test_a_file_is_identical_or_it_is_said_by_how_much(fake, tmp_path, capsys, suffix, quality):
    file = str(written(tmp_path / f"a{suffix}", quality=quality))
    assert main(["replay", file]) == 0
    assert "identical" in capsys.readouterr().out
    assert fake.model == "demo"
    expected = SETTINGS | {"prompt": "a fox", "seed": 7, "num_outputs_per_prompt": 1}
    # A server may have a step cache by default; a file that tells of none was made without.
    assert fake.asked == expected | {"step_cache": "off"}
    fake.array = ARRAY.copy()
    fake.array[3, 4] ^= 64
    assert main(["replay", file]) == 1
    out, err = capsys.readouterr()
    assert "different: by at most" in out
    assert "--quantization" in err  # the file does not say how the model ran
    assert main(["replay", file, "--quantization", "fp8"]) == 1
    assert "--quantization" not in capsys.readouterr().err
    assert main(["replay", file, "--tolerance", "255"]) == 0
    if suffix == ".png":
        assert "at most 64 of 255" in out
        assert f"{64 / (24 * 40):.4f}" in out


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_transparency_is_compared_too(fake, tmp_path, capsys, suffix):
    alpha = np.random.default_rng(2).integers(0, 256, (24, 40, 1), dtype=np.uint8)
    fake.array = np.concatenate((ARRAY, alpha), axis=2)
    file = str(written(tmp_path / f"a{suffix}", fake.array))
    assert main(["replay", file]) == 0
    assert "identical" in capsys.readouterr().out
    fake.array = fake.array.copy()
    fake.array[3:9, 4:9, 3] ^= 64
    assert main(["replay", file]) == 1


def test_what_cannot_be_made_again_is_said(fake, tmp_path, capsys):
    def error(*words: str) -> str:
        assert main(["replay", *words]) == 2
        return capsys.readouterr().err

    bare = tmp_path / "bare.png"
    Image.fromarray(ARRAY).save(bare)
    assert "carries no settings" in error(str(bare))
    assert "no such file" in error(str(tmp_path / "none.png"))
    good = str(written(tmp_path / "a.png"))
    assert "made by the model 'demo'" in error(good, "--model-path", "other")
    assert main(["replay", good, "--model-path", "other", "--other-model"]) == 0
    assert main(["replay", good, "--model-path", "/models/demo/"]) == 0
    named = str(written(tmp_path / "named.png", model="what-the-server-called-it"))
    assert main(["replay", named, "--model-path", "demo"]) == 0
    assert "must be a whole number" in error(good, "--tolerance", "x")
    for needs in ({"task_type": "I2I"}, {"task_type": "TI2I", "image_path": ["gone.png"]}):
        assert "--image-path" in error(str(written(tmp_path / "b.png", **needs)))
    for task in ("TI2I", "T2I", "of a later version"):  # pictures at will, and none were given
        assert main(["replay", str(written(tmp_path / "b.png", task_type=task))]) == 0
        assert "image_path" not in fake.asked
    edit = str(written(tmp_path / "c.png", task_type="TI2I", image_path=["gone.png"]))
    assert main(["replay", edit, "--image-path", good]) == 0
    assert fake.asked["image_path"] == [good]
    fake.array = ARRAY[:8]
    assert "has 40x24 pixels" in error(good)
    capsys.readouterr()
    fake.error = InvalidRequest("lora", "ink", "no adapter of that name")
    lora = str(written(tmp_path / "d.png", lora=[{"name": "ink", "weight": 0.5}]))
    said = error(lora)
    assert "the adapter(s) ink" in said
    assert "--lora-path" in said
    fake.error = InvalidRequest("strength", 1, "unknown sampling field")
    assert "do not suit this model" in error(good)


def test_a_model_that_is_not_there_is_named(fake, tmp_path, capsys):
    file = tmp_path / "a.png"
    file.write_bytes(encode_image(ARRAY, metadata=ImageMetadata("x", 1, "gone", {})))
    assert main(["replay", str(file)]) == 2
    assert "the model 'gone', which is not found" in capsys.readouterr().err


def test_settings_that_were_cut_are_no_settings(tmp_path):
    file = tmp_path / "a.jpg"
    long = ImageMetadata("x" * 70_000, 1, "demo", {})
    file.write_bytes(encode_image(ARRAY, "JPEG", metadata=long))
    with pytest.raises(CannotReplay, match="only in part"):
        Recipe.read(file)


def test_the_picture_made_can_be_kept(fake, tmp_path):
    file, kept = written(tmp_path / "a.png"), tmp_path / "again.png"
    assert main(["replay", str(file), "--output", str(kept)]) == 0
    assert compare(kept, ARRAY).identical


def test_a_videos_settings_are_in_its_comment(tmp_path):
    class Container:
        def __init__(self, comment):
            self.metadata = {"comment": comment}

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    told = {"prompt": "a fox", "seed": 7, "model": "demo", "parameters": {"num_frames": 5}}
    found = _read_video(Path("a.mp4"), lambda path: Container(json.dumps(told)))
    assert found == ImageMetadata("a fox", 7, "demo", {"num_frames": 5})
    for comment in ("", "hello", "[]", "{}", json.dumps(told | {"seed": None})):
        assert _read_video(Path("a.mp4"), lambda path, c=comment: Container(c)) is None
