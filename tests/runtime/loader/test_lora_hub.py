"""Adapters by hub id: a simulated hub, and a simulated cache without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import save_file

from sglang.multimodal_gen.runtime.loader.lora_file import find_lora_file
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, ModelNotFound

COMMIT = "4d7a" * 10
TENSORS = {
    "transformer.q.lora_A.weight": torch.ones(2, 4),
    "transformer.q.lora_B.weight": torch.ones(6, 2),
}
CONFIG = '{"peft_type": "LORA", "r": 2, "lora_alpha": 6}'


class Hub:
    """Stands for the library: puts the files that are asked for into a snapshot folder."""

    def __init__(self, snapshot: Path, names: tuple[str, ...]) -> None:
        self.snapshot = snapshot
        self.names = names

    def snapshot_download(self, repo_id, revision, allow_patterns, ignore_patterns,
                          local_files_only):  # fmt: skip
        wanted = huggingface_hub.utils.filter_repo_objects(
            self.names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        self.snapshot.mkdir(parents=True, exist_ok=True)
        for name in wanted:
            put(self.snapshot / name)
        return str(self.snapshot)

    def list_repo_files(self, repo_id):
        return list(self.names)

    def fetched(self) -> set[str]:
        files = (path for path in self.snapshot.rglob("*") if path.is_file())
        return {str(path.relative_to(self.snapshot)) for path in files}


def put(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(CONFIG)
    else:
        save_file(TENSORS, path)


@pytest.fixture
def make_hub(tmp_path, monkeypatch):
    def make(*names: str) -> Hub:
        hub = Hub(tmp_path / "snapshots" / COMMIT, names)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
        monkeypatch.setattr(huggingface_hub, "list_repo_files", hub.list_repo_files)
        monkeypatch.chdir(tmp_path)
        return hub

    return make


def test_the_usual_name_is_fetched_alone_with_its_config(make_hub):
    hub = make_hub("adapter_model.safetensors", "adapter_config.json", "big.safetensors", "x.bin")
    file = find_lora_file("org/ink")
    assert file.path == hub.snapshot / "adapter_model.safetensors"
    assert file.configs[""].alpha == 6
    assert hub.fetched() == {"adapter_model.safetensors", "adapter_config.json"}


def test_the_only_file_needs_no_name(make_hub):
    hub = make_hub("ink.safetensors", "folder/other.safetensors", "README.md")
    assert find_lora_file("org/ink").path == hub.snapshot / "ink.safetensors"
    assert hub.fetched() == {"ink.safetensors"}


def test_one_of_several_is_named(make_hub):
    hub = make_hub("a.safetensors", "b.safetensors", "folder/c.safetensors")
    with pytest.raises(CheckpointError, match=r"2 .safetensors files: a.safetensors, b.safetensors"
                       r"\. Give the one you mean: org/ink:a.safetensors"):  # fmt: skip
        find_lora_file("org/ink")
    assert find_lora_file("org/ink:b.safetensors").path == hub.snapshot / "b.safetensors"
    assert hub.fetched() == {"b.safetensors"}
    nested = find_lora_file("org/ink:folder/c.safetensors").path
    assert nested == hub.snapshot / "folder/c.safetensors"
    assert find_lora_file("org/ink", "a.safetensors").path == hub.snapshot / "a.safetensors"


@pytest.mark.parametrize(
    ("names", "asked", "message"),
    [
        (("b.safetensors",), "org/ink:c.safetensors", "no file 'c.safetensors'. Did you mean 'b"),
        (("README.md",), "org/ink", "holds 0 .safetensors files"),
        (("README.md",), "org/ink:a.safetensors", "It has: no .safetensors file"),
    ],
)
def test_what_a_repository_lacks_is_said(make_hub, names, asked, message):
    make_hub(*names)
    with pytest.raises(CheckpointError) as caught:
        find_lora_file(asked)
    assert message in str(caught.value)


def test_a_folder_here_wins(make_hub, tmp_path):
    hub = make_hub("a.safetensors")
    put(tmp_path / "org/ink/mine.safetensors")
    assert find_lora_file("org/ink").path == Path("org/ink/mine.safetensors")
    assert hub.fetched() == set()


def test_no_such_repository_is_said(monkeypatch):
    def refuse(*args, **kwargs):
        raise RepositoryNotFoundError("404", response=Response())

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFound, match="lora_path='org/ink' is neither a folder here nor"):
        find_lora_file("org/ink")


class Response:
    headers: dict[str, str] = {}
    request = None
    status_code = 404


FIND = """
import socket, sys
def refuse(*args):
    raise AssertionError("no network here")
socket.socket.connect = refuse
from sglang.multimodal_gen.runtime.loader.lora_file import find_lora_file
from sglang.multimodal_gen.runtime.utils.errors import DiffusionError
for name in sys.argv[1:]:
    try:
        print(find_lora_file(name).path)
    except DiffusionError as error:
        print(type(error).__name__, error)
"""


def test_a_cached_adapter_is_found_offline(tmp_path):
    folder = tmp_path / "hub/models--org--ink"
    snapshot = folder / "snapshots" / COMMIT
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(COMMIT)
    put(snapshot / "ink.safetensors")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_"))}
    env |= {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path)}
    names = ["org/ink", "org/ink:ink.safetensors", "org/ink:red.safetensors", "org/other"]
    done = subprocess.run(
        [sys.executable, "-c", FIND, *names], check=True, capture_output=True, text=True, env=env,
        timeout=120,
    )  # fmt: skip
    one, same, lacks, other = done.stdout.splitlines()
    assert one == same == str(snapshot / "ink.safetensors")
    assert lacks.startswith("CheckpointError lora_path='org/ink' has no file 'red.safetensors'")
    assert other.startswith("ModelNotFound lora_path='org/other' is no folder here and not in the")
    assert "HF_HUB_OFFLINE is set" in other
