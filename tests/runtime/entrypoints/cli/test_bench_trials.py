"""`sglang bench step` and `sglang bench request`, on the CPU."""

from __future__ import annotations

import json
import shutil

import pytest

from runtime.conftest import folder as folder
from sglang.multimodal_gen.runtime.entrypoints.bench import profile
from sglang.multimodal_gen.runtime.entrypoints.cli.main import main
from sglang.multimodal_gen.runtime.utils.errors import OutputError

SMALL = ["--height", "32", "--width", "32", "--max-sequence-length", "16", "--device", "cpu"]
FEW = ["--warm-up", "0", "--rounds", "2"]


def measured(command, path, output, *words):
    line = ["bench", command, "--model-path", str(path), *SMALL, *FEW, *words]
    assert main([*line, "--output", str(output)]) == 0
    return json.loads(output.read_text())


@pytest.mark.slow
def test_steps_beside_diffusers_with_a_profile(folder, tmp_path, capsys):
    report = measured(
        "step", folder, tmp_path / "step.json", "--num-inference-steps", "3", "--gpu", "h200",
        "--profile", str(tmp_path / "trace"),
    )  # fmt: skip
    ours, theirs = report["sides"]
    assert (ours["name"], theirs["name"]) == ("sglang", "diffusers")
    assert ours["step_ms"]["samples"] == theirs["step_ms"]["samples"] == 2 * (3 - 1)
    ratio = ours["step_ms"]["median"] / theirs["step_ms"]["median"]
    assert ours["step_ms_ratio"] == pytest.approx(ratio)
    floor = report["floor"]
    assert 0 < floor["step_seconds"] < floor["seconds"]
    percent = 1e5 * floor["step_seconds"] / ours["step_ms"]["median"]
    assert ours["step_ms_percent_of_floor"] == pytest.approx(percent)
    assert ours["peak_gib"] > 0
    assert report["profile"]["steps"] == 2
    assert report["profile"]["waits"] == {}
    assert any(row["name"] == "aten::addmm" for row in report["profile"]["operations"])
    assert "sglang.bench step" in (tmp_path / "trace" / "trace.json").read_text()
    assert "aten::addmm" in (tmp_path / "trace" / "operations.txt").read_text()
    said = capsys.readouterr().out
    assert "ms a step" in said
    assert "first request, with what it waits for: sglang" in said
    assert "waits of the host in 2 steps: none" in said


def test_whole_requests_of_a_folder_without_weights(folder, tmp_path, capsys):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors*"))
    words = ["--random-weights", "--num-inference-steps", "2", "--quantization", "fp8"]
    report = measured("request", bare, tmp_path / "request.json", *words, "--reference=diffusers")
    ours, theirs = report["sides"]  # the reference is as it is, whatever ours are quantised to
    assert ours["seconds"]["samples"] == theirs["seconds"]["samples"] == 2
    assert ours["stages"]["decoding_stage"] > 0
    assert ours["seconds"]["median"] > ours["stages"]["denoising_stage"]
    assert report["floor"] is None  # nobody knows this CPU's rates
    assert "decoding_stage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rounds", "0"], "rounds=0: must lie in 1..1000"),
        (["--gpu", "h2000"], "Did you mean 'h200'"),
        (["--num-gpus", "2"], "one rank is measured here"),
        (["--height", "33"], "height"),
    ],
)
def test_mistakes_are_told_before_weights_are_read(folder, tmp_path, capsys, words, said):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors*"))
    line = ["bench", "step", "--model-path", str(bare), "--device", "cpu", *words]
    assert main(line) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--profile", "--output"])
def test_a_place_that_takes_no_result_is_told_before_weights_are_read(
    folder, tmp_path, capsys, flag
):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors*"))
    (tmp_path / "file").write_text("mine")
    place = tmp_path / "file" if flag == "--profile" else tmp_path / "file" / "step.json"
    assert main(["bench", "step", "--model-path", str(bare), *SMALL, flag, str(place)]) != 0
    said = capsys.readouterr().err
    assert "the output folder" in said
    assert "loading" not in said
    assert (tmp_path / "file").read_text() == "mine"


def test_a_profile_that_fails_leaves_what_was_measured(folder, tmp_path, capsys, monkeypatch):
    def full(*args):
        raise OutputError("cannot write: the disk is full")

    monkeypatch.setattr(profile, "profiled", full)
    output = tmp_path / "step.json"
    words = ["--num-inference-steps", "2", "--reference", "none", "--warm-up", "0", "--rounds", "1"]
    places = ["--output", str(output), "--profile", str(tmp_path / "trace")]
    assert main(["bench", "step", "--model-path", str(folder), *SMALL, *words, *places]) != 0
    told = capsys.readouterr()
    assert "the disk is full" in told.err
    assert "ms a step" in told.out
    assert json.loads(output.read_text())["sides"][0]["step_ms"]["median"] > 0


def test_help(capsys):
    assert main(["bench", "step", "--help"]) == 0
    assert "--profile" in capsys.readouterr().out
