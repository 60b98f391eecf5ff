from __future__ import annotations

import json
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sglang.multimodal_gen.runtime.loader.checkpoint import (
    choose_weight_file,
    find_checkpoint,
    listed,
)
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

WriteShards = Callable[..., Path]
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def _save(path: Path, *names: str, value: float = 0.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.full((2,), value) for name in names}, path)
    return path


def _sharded(folder: Path, write_shards: WriteShards) -> Path:
    return write_shards(
        folder, {ONE: {"a": torch.zeros(2), "b": torch.zeros(3)}, TWO: {"c": torch.zeros(4)}}
    )


def _refusal(path: Path) -> str:
    before = sorted(path.iterdir())
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert sorted(path.iterdir()) == before
    return message


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.safetensors"], "model.safetensors"),
        (["model.safetensors", "model.fp16.safetensors"], "model.safetensors"),
        (["model.safetensors", "adapter.safetensors"], "model.safetensors"),
        (["model.safetensors", "pytorch_model.bin"], "model.safetensors"),
        (["weights.safetensors"], "weights.safetensors"),
        (["weights.safetensors", "weights.bf16.safetensors"], "weights.safetensors"),
        (["model.fp16.safetensors"], "model.fp16.safetensors"),
        (["model-00001-of-00001.safetensors"], "model-00001-of-00001.safetensors"),
        ([INDEX, ONE, TWO], INDEX),
        ([INDEX, ONE, TWO, "model.safetensors"], INDEX),
        ([INDEX, "model.safetensors.index.fp16.json"], INDEX),
        ([INDEX, "model.fp16.safetensors.index.json"], INDEX),
        ([INDEX, "other.safetensors.index.json"], INDEX),
        (["other.safetensors.index.json", "model.safetensors"], "other.safetensors.index.json"),
        # The hub's JSON files are fetched whatever the variant: a plain file beats a variant index.
        (["model.safetensors.index.fp16.json", "model.safetensors"], "model.safetensors"),
        (["model.safetensors.index.fp16.json"], "model.safetensors.index.fp16.json"),
        (["model.safetensors", ONE, TWO], "model.safetensors"),
        (["model.safetensors", "model-00001-of-00002.fp16.safetensors"], "model.safetensors"),
    ],
)
def test_the_choice(names: list[str], chosen: str, tmp_path: Path) -> None:
    assert choose_weight_file(names, tmp_path) == chosen
    assert choose_weight_file([*reversed(names), "config.json"], tmp_path) == chosen


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a.safetensors", "b.safetensors"], "2 weight files"),
        (["model.safetensors", "diffusion_pytorch_model.safetensors"], "2 weight files"),
        (["model.fp16.safetensors", "model.bf16.safetensors"], "2 weight files"),
        (["a.safetensors.index.json", "b.safetensors.index.json"], "2 index files"),
        ([ONE, TWO], "no .*index.json"),
        ([ONE, TWO, "adapter.safetensors"], "no .*index.json"),
        ([ONE, TWO, "model.fp16.safetensors"], "no .*index.json"),
        (["model.fp16-00001-of-00002.safetensors"], "no .*index.json"),
        ([], "it is empty"),
        (["config.json"], "it holds config.json"),
        (["pytorch_model.bin", "model.ckpt"], "pickle"),
    ],
)
def test_no_choice_is_an_error(names: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        choose_weight_file(names, tmp_path)


def test_a_single_file_is_described(tmp_path: Path) -> None:
    path = _save(tmp_path / "model.safetensors", "a", "b")
    found = find_checkpoint(tmp_path)
    assert (found.files, found.unused) == ((path,), ())
    assert set(found.tensors) == {"a", "b"}
    assert found.total_bytes == 16


def test_a_named_file_is_taken_as_it_is(tmp_path: Path) -> None:
    path = _save(tmp_path / "model.fp16.safetensors", "a")
    _save(tmp_path / "model.safetensors", "b")
    assert set(find_checkpoint(path).tensors) == {"a"}


def test_the_index_is_authoritative(tmp_path: Path, write_shards: WriteShards) -> None:
    _sharded(tmp_path, write_shards)
    stray = _save(tmp_path / "model.safetensors", "a", "stray", value=9.0)
    found = find_checkpoint(tmp_path)
    assert [path.name for path in found.files] == [ONE, TWO]
    assert {name: stored.file.name for name, stored in found.tensors.items()} == {
        "a": ONE,
        "b": ONE,
        "c": TWO,
    }
    assert found.unused == (stray,)


def test_a_tensor_that_the_index_does_not_name_is_not_read(
    tmp_path: Path, write_shards: WriteShards
) -> None:
    _sharded(tmp_path, write_shards)
    index = json.loads((tmp_path / INDEX).read_text())
    del index["weight_map"]["b"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert set(find_checkpoint(tmp_path).tensors) == {"a", "c"}


def test_a_missing_shard_is_named_with_its_tensors(
    tmp_path: Path, write_shards: WriteShards
) -> None:
    _sharded(tmp_path, write_shards)
    (tmp_path / ONE).unlink()
    message = _refusal(tmp_path)
    assert "1 of 2 files" in message
    assert ONE in message
    assert "2 tensors: a, b" in message


def test_a_missing_shard_is_found_before_a_large_one_is_read(
    tmp_path: Path, write_shards: WriteShards
) -> None:
    write_shards(tmp_path, {ONE: {"a": torch.zeros(2**20)}, TWO: {"b": torch.zeros(2)}})
    (tmp_path / TWO).unlink()
    tracemalloc.start()
    try:
        _refusal(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_stale_index_beside_a_whole_file_is_explained(
    tmp_path: Path, write_shards: WriteShards
) -> None:
    _sharded(tmp_path, write_shards)
    (tmp_path / ONE).unlink()
    (tmp_path / TWO).unlink()
    _save(tmp_path / "model.safetensors", "a")
    message = _refusal(tmp_path)
    assert "the index is stale" in message
    assert "model.safetensors:" in message


def test_a_tensor_absent_from_its_shard_is_named(tmp_path: Path, write_shards: WriteShards) -> None:
    _sharded(tmp_path, write_shards)
    _save(tmp_path / TWO, "d")
    message = _refusal(tmp_path)
    assert f"1 tensors in {TWO} that are not there: c" in message


def test_a_truncated_shard_is_named(tmp_path: Path, write_shards: WriteShards) -> None:
    _sharded(tmp_path, write_shards)
    whole = (tmp_path / TWO).read_bytes()
    (tmp_path / TWO).write_bytes(whole[:-3])
    message = _refusal(tmp_path)
    assert TWO in message
    assert "3 of" in message


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors",
        "a/../../model.safetensors",
        "/etc/model.safetensors",
        "..\\model.safetensors",
        "C:/model.safetensors",
    ],
)
def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "component"
    folder.mkdir()
    _save(tmp_path / "model.safetensors", "a")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    assert "outside its own folder" in _refusal(folder)


def test_a_linked_shard_is_no_way_out(tmp_path: Path) -> None:
    """Hub caches keep the files elsewhere and link to them."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(_save(tmp_path / "blobs/4d7a", "a"))
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert set(find_checkpoint(folder).tensors) == {"a"}


@pytest.mark.parametrize("shard", ["model.bin", "model", 3, None, ["model.safetensors"]])
def test_an_index_names_safetensors_files_only(tmp_path: Path, shard: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    assert "not a .safetensors file" in _refusal(tmp_path)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_an_index_without_a_map_is_refused(tmp_path: Path, index: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert "no weight_map" in _refusal(tmp_path)


class _Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt", "model.pkl"])
def test_a_pickle_is_refused_and_does_not_run(tmp_path: Path, name: str) -> None:
    fired = tmp_path / "fired"
    payload = pickle.dumps(_Canary(fired))
    pickle.loads(payload)
    assert fired.exists(), "the canary must be able to fire"
    fired.unlink()

    folder = tmp_path / "component"
    folder.mkdir()
    (folder / name).write_bytes(payload)
    message = _refusal(folder)
    assert "run code" in message
    assert "save_file" in message
    with pytest.raises(CheckpointError, match="pickle"):
        find_checkpoint(folder / name)
    assert not fired.exists()


def test_a_pickle_under_a_false_name_is_refused_and_does_not_run(tmp_path: Path) -> None:
    fired = tmp_path / "fired"
    folder = tmp_path / "component"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(pickle.dumps(_Canary(fired)))
    assert "pickle" in _refusal(folder)
    assert not fired.exists()


def test_hidden_files_and_folders_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    _save(tmp_path / ".cache.safetensors", "a")
    assert "it is empty" in _refusal(tmp_path)


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere does not exist"):
        find_checkpoint(tmp_path / "nowhere")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match="neither"):
        find_checkpoint(tmp_path / "notes.txt")


def test_long_lists_are_cut() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed(range(12), 3) == "0, 1, 2 and 9 more"
