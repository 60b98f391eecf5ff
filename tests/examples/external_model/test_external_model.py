"""The example package serves its checkpoint through each of its doors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/external_model"
VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
REQUEST = ("--prompt", "a red fox", "--seed", "1", "--num-inference-steps", "2", "--json")

pytestmark = pytest.mark.slow


def run(
    *arguments: object, path: Path = EXAMPLE, package: str = "tiny_painter", fail: bool = False
):
    env = os.environ | {"PYTHONPATH": f"{path}:{ROOT / 'python'}", VARIABLE: package}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) is fail, done.stderr
    return done.stderr if fail else done.stdout


def generate(model: object, out: Path, *more: object, **options) -> bytes:
    """The bytes of the picture that a command makes."""
    command = "sglang.multimodal_gen.runtime.entrypoints.cli.main"
    text = run(
        "-m", command, "generate", "--model-path", model, "--output-path", out,
        "--no-save-metadata", *REQUEST, *more, **options,
    )  # fmt: skip
    return Path(json.loads(text)["images"][0]["path"]).read_bytes()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "any-name"
    run("-m", "tiny_painter.checkpoint", folder)
    return folder


@pytest.fixture(scope="module")
def picture(model: Path, tmp_path_factory) -> bytes:
    """The picture through the environment variable, found by ``_class_name``."""
    return generate(model, tmp_path_factory.mktemp("out"))


def test_the_package_is_served_through_the_variable(picture: bytes, model, tmp_path) -> None:
    assert picture.startswith(b"\x89PNG")
    assert generate(model, tmp_path, "--num-inference-steps", "3") != picture


def test_without_the_package_the_model_is_unknown(model: Path) -> None:
    command = "sglang.multimodal_gen.runtime.entrypoints.cli.main"
    said = run("-m", command, "generate", "--model-path", model, *REQUEST, package="", fail=True)
    assert "no native family serves _class_name='TinyPainterPipeline'" in said


def test_an_installed_package_is_served_through_its_entry_point(
    picture: bytes, model: Path, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "site"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    run(
        "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--no-build-isolation", "--target", target, source,
    )  # fmt: skip
    assert generate(model, tmp_path / "out", path=target, package="") == picture
    # Both doors at once: it is imported once, so that nothing is registered twice.
    command = "sglang.multimodal_gen.runtime.entrypoints.cli.main"
    assert "TinyPainterPipeline" in run("-m", command, "models", path=target)


def test_a_checkpoint_without_an_index_is_served_by_its_folders_name_and_by_the_pipelines(
    picture: bytes, model: Path, tmp_path: Path
) -> None:
    bare = shutil.copytree(model, tmp_path / "tiny-painter")
    (bare / "model_index.json").unlink()
    assert generate(bare, tmp_path / "out") == picture
    bare = bare.rename(tmp_path / "another-name")
    assert generate(bare, tmp_path / "out", "--pipeline", "TinyPainterPipeline") == picture


def test_the_port_is_verified_against_the_packages_own_reference(model: Path, tmp_path) -> None:
    command = "sglang.multimodal_gen.runtime.entrypoints.cli.main"
    report = tmp_path / "report.json"
    reference = "tiny_painter.reference:TinyPainterReference"
    said = run(
        "-m", command, "verify", model, "--reference", reference, "--json", report,
        "--device", "cpu",
    )  # fmt: skip
    assert "passed: 14 checks" in said  # three of them on ranks, which import the package
    assert json.loads(report.read_text())["passed"] is True
    said = run("-m", command, "verify", model, "--device", "cpu", fail=True)
    assert "Diffusers" in said
    assert "--reference MODULE:CLASS" in said
    assert "Traceback" not in said


def test_one_safetensors_file_is_the_transformer(
    picture: bytes, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "painter.safetensors"
    shutil.copy(model / "transformer/diffusion_pytorch_model.safetensors", file)
    parts = ("text_encoder", "tokenizer", "scheduler", "vae", "transformer")
    flags = [word for name in parts for word in (f"--component-paths.{name}", model / name)]
    forced = ("--pipeline-class-name", "TinyPainterPipeline")
    assert generate(file, tmp_path / "out", *forced, *flags) == picture
    command = "sglang.multimodal_gen.runtime.entrypoints.cli.main"
    said = run(
        "-m", command, "generate", "--model-path", file, *REQUEST, *forced, *flags[2:], fail=True
    )
    assert "--component-paths.text_encoder FOLDER" in said
    assert "Traceback" not in said
