from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sglang.multimodal_gen.runtime.loader import model_source
from sglang.multimodal_gen.runtime.loader.model_source import (
    bundled_models,
    read_sampling_defaults,
    resolve_model_source,
)
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, ModelNotFound

INDEX = {"_class_name": "FluxPipeline", "vae": ["diffusers", "AutoencoderKL"]}


def _model(folder: Path, index: object = INDEX) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundled model named `demo`, whether the package ships one or not."""
    folder = _model(tmp_path / "package/demo")
    monkeypatch.setattr(model_source, "bundled_models", lambda: {"demo": folder})
    return folder


def _hint(path: Path) -> str:
    with pytest.raises(ModelNotFound) as caught:
        resolve_model_source(str(path))
    message = str(caught.value)
    assert f"model_path={str(path)!r}" in message
    assert "\n" not in message
    return message


def test_a_local_folder_is_found(tmp_path: Path) -> None:
    source = resolve_model_source(str(_model(tmp_path / "m")))
    assert (source.kind, source.root, source.name) == ("local", tmp_path / "m", str(tmp_path / "m"))
    assert source.class_name == "FluxPipeline"
    assert source.components == {"vae": ("diffusers", "AutoencoderKL")}


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    _model(tmp_path / "m")
    assert resolve_model_source("~/m").root == tmp_path / "m"


def test_a_relative_folder_that_looks_like_a_hub_id_is_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _model(tmp_path / "org/name")
    assert resolve_model_source("org/name").kind == "local"


def test_a_bundled_name_is_found(bundled: Path) -> None:
    source = resolve_model_source("demo")
    assert (source.kind, source.root) == ("bundled", bundled)


def test_a_whole_model_here_wins_over_a_bundled_name(
    bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert resolve_model_source("demo").kind == "bundled"
    _model(tmp_path / "demo")
    assert resolve_model_source("demo").kind == "local"


def test_bundled_models_are_folders_with_an_index() -> None:
    assert all((folder / "model_index.json").is_file() for folder in bundled_models().values())


def test_a_name_that_is_nothing_gets_a_hint(bundled: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"Did you mean 'demo'\? Bundled: demo"):
        resolve_model_source("dmo")


@pytest.mark.parametrize(
    "path", ["/nowhere/at/all", "./org/name", "a/b/c", "../x", "org/..", "-o/x"]
)
def test_a_path_that_is_not_there_asks_no_hub(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match="no such folder"):
        resolve_model_source(path)


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "flux.safetensors"
    file.touch()
    assert "is a file" in _hint(file)
    assert f"Give its folder instead: {tmp_path}" in _hint(_model(tmp_path) / "model_index.json")
    (tmp_path / "flux.ckpt").touch()
    assert "Pickle" in _hint(tmp_path / "flux.ckpt")


def test_an_empty_folder_is_told_as_such(tmp_path: Path) -> None:
    assert "The folder is empty" in _hint(tmp_path)


@pytest.mark.parametrize("depth", ["inner", "snapshots/4d7a"])
def test_a_folder_above_the_model_names_the_model(tmp_path: Path, depth: str) -> None:
    _model(tmp_path / depth)
    assert f"Give the folder inside it instead: {tmp_path / depth}" in _hint(tmp_path)


def test_a_lora_is_recognised(tmp_path: Path) -> None:
    save_file({"x.lora_A.weight": torch.zeros(1)}, tmp_path / "pytorch_lora_weights.safetensors")
    assert "LoRA" in _hint(tmp_path)
    peft = tmp_path / "peft"
    peft.mkdir()
    (peft / "adapter_config.json").write_text("{}")
    assert "LoRA" in _hint(peft)


def test_a_component_is_recognised_and_its_parent_offered(tmp_path: Path) -> None:
    vae = tmp_path / "vae"
    vae.mkdir()
    (vae / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    message = _hint(vae)
    assert "one component (AutoencoderKL)" in message
    assert "Give the folder above it" not in message
    _model(tmp_path)
    assert f"Give the folder above it: {tmp_path}" in _hint(vae)


def test_a_text_encoder_of_a_model_is_a_component(tmp_path: Path) -> None:
    encoder = _model(tmp_path) / "text_encoder"
    encoder.mkdir()
    (encoder / "config.json").write_text('{"model_type": "t5"}')
    assert f"Give the folder above it: {tmp_path}" in _hint(encoder)


def test_a_transformers_model_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "Transformers model (model_type 'llama')" in _hint(tmp_path)


def test_a_damaged_config_does_not_hide_the_hint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert "one component" in _hint(tmp_path)


def test_other_folders_are_described(tmp_path: Path) -> None:
    (tmp_path / "flux.safetensors").touch()
    assert "single-file weights (flux.safetensors)" in _hint(tmp_path)
    (tmp_path / "flux.safetensors").rename(tmp_path / "flux.bin")
    assert "pickle" in _hint(tmp_path)
    (tmp_path / "flux.bin").rename(tmp_path / "README.md")
    assert "is the download complete?" in _hint(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"_class_name": "P", "vae": ["x"]}'])
def test_a_damaged_index_is_the_checkpoints_fault(tmp_path: Path, content: str) -> None:
    (tmp_path / "model_index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model_index\.json"):
        resolve_model_source(str(tmp_path))


def test_sampling_defaults_are_read(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}
    values: dict[str, Any] = {"height": 128, "true_cfg_scale": 4.0, "negative_prompt": ""}
    (tmp_path / "sampling_params.json").write_text(json.dumps(values))
    assert read_sampling_defaults(tmp_path) == values


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_damaged_sampling_defaults_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "sampling_params.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"sampling_params\.json"):
        read_sampling_defaults(tmp_path)


@pytest.mark.parametrize("path", ["~nobody-of-that-name/x", "x" * 5000])
def test_what_cannot_be_a_path_is_refused_in_words(path):
    with pytest.raises(ModelNotFound, match="no usable path"):
        resolve_model_source(path)
