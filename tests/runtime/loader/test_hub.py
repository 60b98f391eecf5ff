from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from sglang.multimodal_gen.runtime.loader.hub import fetch_from_hub
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, ModelNotFound

COMMIT = "4d7a" * 10
INDEX = {
    "_class_name": "FluxPipeline",
    "vae": ["diffusers", "AutoencoderKL"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "safety_checker": [None, None],
}
RESOLVE = """
import socket, sys
opened = []
class Refusing(socket.socket):
    def connect(self, *address):
        opened.append(address)
        raise OSError("no network")
socket.socket = Refusing
from sglang.multimodal_gen.runtime.loader.model_source import resolve_model_source
from sglang.multimodal_gen.runtime.utils.errors import ModelNotFound
try:
    source = resolve_model_source(sys.argv[1], sys.argv[2] or None)
    print(source.kind, source.root)
except ModelNotFound as error:
    print("ModelNotFound", error)
assert not opened, opened
"""


def _cache(home: Path, repo: str = "org/model") -> Path:
    """A hub cache as the library lays it out, with the needed files only; returns the snapshot."""
    folder = home / "hub" / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(COMMIT)
    (snapshot / "vae").mkdir(parents=True)
    (snapshot / "model_index.json").write_text(json.dumps(INDEX))
    (snapshot / "vae/config.json").write_text("{}")
    return snapshot


def _resolve_offline(home: Path, repo: str, revision: str = "") -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_"))}
    env |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", RESOLVE, repo, revision]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=env, timeout=60)
    return run.stdout.strip()


@pytest.mark.parametrize("revision", ["", "main", COMMIT])
def test_a_cached_model_is_found_offline(tmp_path: Path, revision: str) -> None:
    snapshot = _cache(tmp_path)
    assert _resolve_offline(tmp_path, "org/model", revision) == f"hub {snapshot}"


def test_a_model_that_is_not_cached_is_refused_offline_at_once(tmp_path: Path) -> None:
    start = time.monotonic()
    said = _resolve_offline(tmp_path, "org/other")
    assert time.monotonic() - start < 30  # a subprocess that imports the library, on a busy machine
    assert said.startswith("ModelNotFound model_path='org/other' is no folder here and not in")
    assert str(tmp_path) in said
    assert "HF_HUB_OFFLINE is set" in said


def test_a_revision_that_is_not_cached_is_refused_offline(tmp_path: Path) -> None:
    _cache(tmp_path)
    assert "at revision 'v2'" in _resolve_offline(tmp_path, "org/model", "v2")


class Hub:
    """Stands for the library: serves files from `remote` into a snapshot folder."""

    def __init__(self, snapshot: Path, remote: dict[str, str]) -> None:
        self.snapshot = snapshot
        self.remote = remote
        self.revisions: list[str | None] = []

    def hf_hub_download(self, repo_id: str, filename: str, revision: str | None) -> str:
        self.revisions.append(revision)
        return str(self._put(filename))

    def snapshot_download(
        self,
        repo_id: str,
        revision: str | None,
        allow_patterns: list[str],
        ignore_patterns: list[str],
        local_files_only: bool,
    ) -> str:
        self.revisions.append(revision)
        wanted = huggingface_hub.utils.filter_repo_objects(
            self.remote, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        for name in wanted:
            self._put(name)
        return str(self.snapshot)

    def fetched(self) -> set[str]:
        files = (path for path in self.snapshot.rglob("*") if path.is_file())
        return {str(path.relative_to(self.snapshot)) for path in files}

    def _put(self, name: str) -> Path:
        path = self.snapshot / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.remote[name])
        return path


MakeHub = Callable[..., Hub]


@pytest.fixture
def make_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeHub:
    def make(*files: str, index: object = INDEX) -> Hub:
        remote = dict.fromkeys(files, "{}") | {"model_index.json": json.dumps(index)}
        hub = Hub(tmp_path / "snapshots" / COMMIT, remote)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.hf_hub_download)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
        return hub

    return make


def test_only_what_is_needed_is_fetched(make_hub: MakeHub) -> None:
    needed = {
        "model_index.json",
        "sampling_params.json",
        "scheduler/scheduler_config.json",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
    }
    hub = make_hub(
        *needed,
        "flux1-dev.safetensors",
        "safety_checker/model.safetensors",
        "vae/diffusion_pytorch_model.bin",
        "vae/diffusion_pytorch_model.fp16.safetensors",
        "vae/diffusion_pytorch_model.fp16-00001-of-00002.safetensors",
        "vae/diffusion_pytorch_model.non_ema.safetensors",
        "vae/modeling.py",
        "README.md",
    )
    assert fetch_from_hub("org/model", None) == hub.snapshot
    assert hub.fetched() == needed


def test_configs_can_be_fetched_without_weights(make_hub: MakeHub) -> None:
    configs = {"model_index.json", "scheduler/scheduler_config.json", "vae/config.json"}
    hub = make_hub(*configs, "vae/diffusion_pytorch_model.safetensors", "vae/x.fp16.safetensors")
    assert fetch_from_hub("org/model", None, weights=False) == hub.snapshot
    assert hub.fetched() == configs


def test_a_component_that_is_a_variant_only_is_fetched(make_hub: MakeHub) -> None:
    variant = "vae/diffusion_pytorch_model.fp16.safetensors"
    hub = make_hub("vae/config.json", variant, "vae/diffusion_pytorch_model.fp16.bin")
    fetch_from_hub("org/model", None)
    assert hub.fetched() == {"model_index.json", "vae/config.json", variant}


def test_all_files_are_of_the_commit_of_the_index(make_hub: MakeHub) -> None:
    hub = make_hub("vae/config.json")
    fetch_from_hub("org/model", "main")
    assert hub.revisions[0] == "main"
    assert set(hub.revisions[1:]) == {COMMIT}


def test_an_index_cannot_ask_for_files_elsewhere(make_hub: MakeHub) -> None:
    make_hub(index=INDEX | {"../other": ["diffusers", "AutoencoderKL"]})
    with pytest.raises(CheckpointError, match=r"'\.\./other'"):
        fetch_from_hub("org/model", None)


def _http(kind: type[HfHubHTTPError]) -> HfHubHTTPError:
    response: Any = SimpleNamespace(headers={}, request=None)
    return kind("no", response=response)


@pytest.mark.parametrize(
    ("make_error", "said"),
    [
        (lambda: _http(RepositoryNotFoundError), "neither a folder here nor a repository"),
        (lambda: _http(GatedRepoError), "gated"),
        (lambda: _http(RevisionNotFoundError), "no such branch"),
        (lambda: EntryNotFoundError("no"), "no pipeline in the Diffusers layout"),
        (lambda: LocalEntryNotFoundError("no"), "the hub cannot be reached"),
        (lambda: HFValidationError("bad id"), "no hub id: bad id"),
        (lambda: _http(HfHubHTTPError), "could not be fetched"),
        (lambda: OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_the_librarys_errors_are_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, make_error: Callable[[], Exception], said: str
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise make_error()

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ModelNotFound, match=said) as caught:
        fetch_from_hub("org/model", "v1")
    assert "model_path='org/model' at revision 'v1'" in str(caught.value)
    assert caught.value.__cause__ is not None
