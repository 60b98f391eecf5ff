"""Folders of published models without weights: their sizes, and that both sides run on them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import diffusers
import pytest
import torch
import transformers
from torch import nn

from sglang.multimodal_gen.runtime.entrypoints.cli.main import main

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PUBLISHED = {
    "flux-dev": {
        "transformer": 11_901_408_320,
        "text_encoder": 123_060_480,
        "text_encoder_2": 4_762_310_656,
        "vae": 83_819_683,
    },
    "wan2.1-1.3b": {
        "transformer": 1_418_996_800,
        "text_encoder": 5_680_910_336,
        "vae": 126_892_531,
    },
    "qwen-image": {
        "transformer": 20_430_401_088,
        "text_encoder": 8_292_166_656,
        "vae": 126_892_531,
    },
}
"""Parameters of the published weights."""
REQUESTS = {
    "flux-dev": (["--height=32", "--width=32", "--max-sequence-length=16"], 1),
    "wan2.1-1.3b": (["--height=32", "--width=32", "--num-frames=5"], 2),
    "qwen-image": (["--height=32", "--width=32", "--true-cfg-scale=1"], 1),
}
"""Settings, and the forwards a step that they ask for: Wan guides itself by default."""


@pytest.fixture
def folders(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("model_folders")


def modules(folder: Path):
    """Each network of a folder by its published class, on the meta device."""
    for name, entry in json.loads((folder / "model_index.json").read_text()).items():
        if not isinstance(entry, list):
            continue
        library = {"diffusers": diffusers, "transformers": transformers}[entry[0]]
        cls = getattr(library, entry[1])
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            continue
        with torch.device("meta"):
            if library is diffusers:
                yield name, cls.from_config(cls.load_config(folder / name))
            else:
                yield name, cls(cls.config_class.from_pretrained(folder / name))


def test_sizes_are_the_published(folders, tmp_path):
    assert folders.main([*PUBLISHED, "--out", str(tmp_path)]) == 0
    counts = {
        name: {part: sum(p.numel() for p in m.parameters()) for part, m in modules(tmp_path / name)}
        for name in PUBLISHED
    }
    assert counts == PUBLISHED


def test_the_chat_has_as_many_tokens_as_published(folders, tmp_path):
    from sglang.multimodal_gen.configs.pipeline_configs.qwen_image import DESCRIBE

    importlib.import_module("folder_tokenizers").write_qwen2(tmp_path / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    head, after = DESCRIBE.split("{}")
    assert len(tokenizer(head).input_ids) == 34
    assert len(tokenizer(after).input_ids) == 5


@pytest.mark.parametrize("name", PUBLISHED)
def test_both_sides_do_the_same_work(folders, tmp_path, name):
    assert folders.main([name, "--toy", "--out", str(tmp_path)]) == 0
    settings, forwards = REQUESTS[name]
    output = tmp_path / "step.json"
    line = ["bench", "step", "--model-path", str(tmp_path / name), "--random-weights",
            "--reference", "diffusers", "--device", "cpu", "--precision", "bf16",
            "--num-inference-steps", "3", "--warm-up", "0", "--rounds", "1",
            "--output", str(output), *settings]  # fmt: skip
    assert main(line) == 0
    report = json.loads(output.read_text())
    ours, theirs = report["sides"]
    assert ours["forwards_a_step"] == theirs["forwards_a_step"] == forwards
    assert ours["step_ms"]["samples"] == theirs["step_ms"]["samples"] == 2
    assert ours["dtypes"] == theirs["dtypes"]
    assert set(ours["dtypes"].values()) == {"bfloat16"}
    assert report["notes"] == []


def test_a_setting_that_the_library_lacks_is_refused(folders, tmp_path, capsys):
    """Else the two sides would do different work; how ours does the same work is its own matter."""
    assert folders.main(["wan2.1-1.3b", "--toy", "--out", str(tmp_path)]) == 0
    line = ["bench", "step", "--model-path", str(tmp_path / "wan2.1-1.3b"), "--random-weights",
            "--reference", "diffusers", "--device", "cpu", "--num-inference-steps", "2",
            "--warm-up", "0", "--rounds", "1", "--height=32", "--width=32",
            "--num-frames=1"]  # fmt: skip
    assert main([*line, "--step-cache", "first-block"]) == 0
    capsys.readouterr()
    assert main([*line, "--flow-shift", "5"]) == 2
    assert "WanPipeline takes no argument 'flow_shift'" in capsys.readouterr().err


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_toy_makes_small_things_unless_asked(folders, tmp_path, name):
    assert folders.main([name, "--toy", "--out", str(tmp_path)]) == 0
    request = json.loads((tmp_path / name / "sampling_params.json").read_text())
    assert request["height"] == request["width"] == 64
    assert request.get("num_frames", 5) == 5


def test_a_folder_may_have_weights_whose_loading_is_told(folders, tmp_path, capsys):
    assert folders.main(["flux-dev", "--toy", "--weights", "fp32", "--out", str(tmp_path)]) == 0
    folder, output = tmp_path / "flux-dev", tmp_path / "request.json"
    on_disk = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    assert on_disk > 4 * sum(p.numel() for _, m in modules(folder) for p in m.parameters()) * 0.9
    line = ["bench", "request", "--model-path", str(folder), "--device", "cpu", "--reference",
            "none", "--num-inference-steps", "1", "--warm-up", "0", "--rounds", "1",
            "--output", str(output)]  # fmt: skip
    capsys.readouterr()
    assert main(line) == 0
    assert "loading sglang: " in capsys.readouterr().out
    assert 0 < json.loads(output.read_text())["load_seconds"] < 60
