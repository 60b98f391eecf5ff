"""A rank reads its slices, and only those; the ranks' slices make up the checkpoint."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.shard import shard_of
from sglang.multimodal_gen.runtime.layers.tensor_parallel import (
    Column,
    Entry,
    PlannedModel,
    Row,
    Vocab,
)
from sglang.multimodal_gen.runtime.loader.checkpoint import find_checkpoint
from sglang.multimodal_gen.runtime.loader.meta_build import build_on_meta
from sglang.multimodal_gen.runtime.loader.weights import LoadReceipt, load_weights
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError
from sglang.multimodal_gen.runtime.utils.progress import ProgressEvent

WriteShards = Callable[..., Path]

PLAN: dict[str, Entry] = {
    "embed": Vocab(),
    "tied": Vocab(),
    "up": Column(),
    "gate": Column(blocks=(1, 1)),
    "down": Row(blocks=("up", "gate")),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.tied = nn.Embedding(7, 4), nn.Embedding(7, 4)
        self.tied.weight = self.embed.weight
        self.up, self.gate = nn.Linear(4, 8), nn.Linear(4, 16)
        self.down = nn.Linear(24, 4)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("ids", torch.arange(3))


SHARDED = ("embed.weight", "up.weight", "up.bias", "gate.weight", "gate.bias", "down.weight")


def _tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    state = {n: torch.rand(p.shape).to(dtype) for n, p in Net().named_parameters()}
    return state | {"ids": torch.tensor([5, 6, 2**40])}


def _load(
    folder: Path,
    rank: int,
    size: int = 2,
    dtype: torch.dtype = torch.float32,
    make: Callable[[], nn.Module] = Net,
    progress: Any = None,
) -> tuple[Any, LoadReceipt]:
    module = build_on_meta(make)
    PlannedModel(module, PLAN).apply(Group("tp", rank, tuple(range(size))))
    receipt = load_weights(
        module, find_checkpoint(folder), device="cpu", dtype=dtype, label="net", progress=progress
    )
    return module, receipt


def _assert_slices(module: nn.Module, whole: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    sharded = []
    for name, parameter in module.named_parameters():
        shard = shard_of(parameter)
        wanted = whole[name] if shard is None else shard.of(whole[name])
        assert torch.equal(parameter, wanted.to(dtype)), name
        assert parameter.is_contiguous()
        assert parameter.dtype == dtype
        assert isinstance(parameter, nn.Parameter)
        sharded += [] if shard is None else [name]
    assert set(sharded) == set(SHARDED)
    assert torch.equal(module.ids, whole["ids"])


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_read_the_checkpoint_once(tmp_path: Path, size: int) -> None:
    tensors = _tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    receipts = []
    for rank in range(size):
        module, receipt = _load(tmp_path, rank, size)
        _assert_slices(module, tensors, torch.float32)
        assert module.tied.weight is module.embed.weight
        receipts.append(receipt)
    total = sum(t.nbytes for t in tensors.values())
    whole = sum(t.nbytes for n, t in tensors.items() if n not in SHARDED)
    assert sum(r.bytes_read for r in receipts) == total + (size - 1) * whole
    assert all(r.tensors == len(tensors) and r.sharded == len(SHARDED) for r in receipts)


def test_one_rank_reads_as_ever(tmp_path: Path) -> None:
    save_file(_tensors(), tmp_path / "model.safetensors")
    _, receipt = _load(tmp_path, 0, 1)
    assert receipt.sharded == 0
    assert receipt.bytes_read == find_checkpoint(tmp_path).total_bytes


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_slices_change_their_dtype_too(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    tensors = _tensors(stored)
    save_file(tensors, tmp_path / "model.safetensors")
    for rank in (0, 1):
        module, _ = _load(tmp_path, rank, dtype=wanted)
        _assert_slices(module, tensors, wanted)


def test_an_island_is_one_also_as_a_slice(tmp_path: Path) -> None:
    save_file(_tensors(), tmp_path / "model.safetensors")
    cls = type("Islands", (Net,), {"_keep_in_fp32_modules": ["down"]})
    module, _ = _load(tmp_path, 1, dtype=torch.bfloat16, make=cls)
    assert module.down.weight.dtype == torch.float32
    assert module.up.weight.dtype == torch.bfloat16


def test_slices_come_from_shards_of_a_file_and_under_other_names(
    tmp_path: Path, write_shards: WriteShards
) -> None:
    tensors = _tensors()
    stored = {f"model.{name}": tensor for name, tensor in tensors.items()}
    names = list(stored)
    write_shards(
        tmp_path,
        {
            "model-00001-of-00002.safetensors": {n: stored[n] for n in names[::2]},
            "model-00002-of-00002.safetensors": {n: stored[n] for n in names[1::2]},
        },
    )
    cls = type("Renamed", (Net,), {"checkpoint_names": {r"^model\.": ""}})
    module, receipt = _load(tmp_path, 1, make=cls)
    _assert_slices(module, tensors, torch.float32)
    assert len(receipt.files) == 2


def test_a_tie_stored_twice_is_compared_slice_by_slice(tmp_path: Path) -> None:
    tensors = _tensors()
    other = tensors["embed.weight"].clone()
    save_file(tensors | {"tied.weight": other}, tmp_path / "model.safetensors")
    module, receipt = _load(tmp_path, 0)
    assert module.tied.weight is module.embed.weight
    once = _load_bytes(tmp_path, tensors)
    assert receipt.bytes_read == once + module.embed.weight.nbytes
    other[6] += 1  # a row of the second rank
    save_file(tensors | {"tied.weight": other}, tmp_path / "model.safetensors")
    _load(tmp_path, 0)
    with pytest.raises(CheckpointError, match="different values"):
        _load(tmp_path, 1)


def _load_bytes(folder: Path, tensors: dict[str, torch.Tensor]) -> int:
    (folder / "once").mkdir()
    save_file(tensors, folder / "once" / "model.safetensors")
    return _load(folder / "once", 0)[1].bytes_read


def test_faults_name_whole_shapes(tmp_path: Path) -> None:
    tensors = _tensors() | {"up.weight": torch.zeros(4, 4), "down.weight": torch.zeros(4, 12)}
    del tensors["gate.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    said = re.escape(
        "Missing (1): [gate.bias]. Misshapen (2): [up.weight (stored 4x4, the model has 8x4), "
        "down.weight (stored 4x12, the model has 4x24)]."
    )
    with pytest.raises(CheckpointError, match=said):
        _load(tmp_path, 0)


def test_progress_still_sums_to_the_total(tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    save_file(_tensors(), tmp_path / "model.safetensors")
    _load(tmp_path, 1, progress=events.append)
    assert events[-1].done == events[-1].total == find_checkpoint(tmp_path).total_bytes


def test_slices_do_not_depend_on_the_file(tmp_path: Path) -> None:
    tensors = _tensors()
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    module, _ = _load(tmp_path, 1)
    path.write_bytes(bytes(path.stat().st_size))
    _assert_slices(module, tensors, torch.float32)


PEAK = """
import json, re, sys
from pathlib import Path
import torch
from torch import nn
from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.tensor_parallel import Column, PlannedModel, Row
from sglang.multimodal_gen.runtime.loader.checkpoint import find_checkpoint
from sglang.multimodal_gen.runtime.loader.meta_build import build_on_meta
from sglang.multimodal_gen.runtime.loader.weights import load_weights

checkpoint = find_checkpoint(Path(sys.argv[1]))
module = build_on_meta(lambda: nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(60)))
entry = {"column": Column(), "row": Row(), "packed": Row(blocks=(1, 3))}[sys.argv[2]]
PlannedModel(module, {"*": entry}).apply(Group("tp", 1, (0, 1)))
warm = torch.ones(8, 8) @ torch.ones(8, 8)

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

before = peak()
load_weights(module, checkpoint, device="cpu", dtype=torch.float32, label="net")
size = sum(p.numel() * p.element_size() for p in module.parameters())
print(json.dumps({"peak": (peak() - before) * 1024, "module": size}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("cut", ["column", "row", "packed"])
def test_the_peak_is_the_slice_and_a_window(tmp_path: Path, cut: str) -> None:
    """Half of 240 MB; a whole tensor is 4 MB, a window of the map 64 MiB."""
    tensors = {f"{n}.weight": torch.rand(1024, 1024) for n in range(60)}
    save_file(tensors, tmp_path / "model.safetensors")
    run = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path), cut],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    seen = json.loads(run.stdout)
    assert seen["module"] == 120 * 2**20
    assert seen["peak"] < seen["module"] + (64 + 24) * 2**20, seen
    assert seen["peak"] > 0.8 * seen["module"], "the measure itself must be able to see the load"
