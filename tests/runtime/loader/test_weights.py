from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sglang.multimodal_gen.runtime.loader.checkpoint import find_checkpoint
from sglang.multimodal_gen.runtime.loader.meta_build import build_on_meta
from sglang.multimodal_gen.runtime.loader.weights import LoadReceipt, dtype_rule, load_weights
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, PipelineDefinitionError
from sglang.multimodal_gen.runtime.utils.progress import ProgressEvent

WriteShards = Callable[..., Path]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.norm = nn.LayerNorm(3)
        self.register_buffer("ids", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("table", torch.arange(4.0), persistent=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


def _tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"linear.weight": (3, 2), "linear.bias": (3,), "norm.weight": (3,), "norm.bias": (3,)}
    tensors = {n: torch.rand(s, generator=generator).to(dtype) for n, s in shapes.items()}
    return tensors | {"ids": torch.tensor([7, 2**40])}


def _load(
    make: Callable[[], nn.Module],
    folder: Path,
    dtype: torch.dtype = torch.float32,
    progress: Any = None,
) -> tuple[Any, LoadReceipt]:
    module = build_on_meta(make)
    checkpoint = find_checkpoint(folder)
    receipt = load_weights(
        module, checkpoint, device="cpu", dtype=dtype, label="net", progress=progress
    )
    return module, receipt


def _saved(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_loaded_module_is_whole_frozen_and_in_eval_mode(tmp_path: Path) -> None:
    tensors = _tensors()
    net, receipt = _load(Net, _saved(tmp_path, tensors))
    state = net.state_dict()
    assert set(state) == set(tensors)
    assert all(torch.equal(state[name], tensors[name]) for name in tensors)
    assert torch.equal(net.table, torch.arange(4.0))
    assert not net.training
    assert not net.norm.training
    assert not any(parameter.requires_grad for parameter in net.parameters())
    assert isinstance(net.linear.weight, nn.Parameter)
    assert (receipt.component, receipt.tensors, receipt.bytes_read) == ("net", 5, 15 * 4 + 16)
    assert receipt.dtypes == {"F32 -> float32": 4, "I64 -> int64": 1}
    assert receipt.dtype_table() == "4 F32 -> float32, 1 I64 -> int64"
    assert receipt.files == (tmp_path / "model.safetensors",)


def test_shards_are_read_where_the_index_says(tmp_path: Path, write_shards: WriteShards) -> None:
    tensors = _tensors()
    names = list(tensors)
    shards = {
        "model-00001-of-00002.safetensors": {name: tensors[name] for name in names[::2]},
        "model-00002-of-00002.safetensors": {name: tensors[name] for name in names[1::2]},
    }
    write_shards(tmp_path, shards)
    save_file({"linear.bias": torch.full((3,), 9.0)}, tmp_path / "model.safetensors")
    net, receipt = _load(Net, tmp_path)
    assert all(torch.equal(net.state_dict()[name], tensors[name]) for name in tensors)
    assert [path.name for path in receipt.unused] == ["model.safetensors"]


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "stored",
    [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn],
)
def test_any_stored_dtype_becomes_the_wanted_one(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    tensors = _tensors(stored)
    net, receipt = _load(Net, _saved(tmp_path, tensors), wanted)
    for name, parameter in net.named_parameters():
        assert parameter.dtype == wanted
        assert torch.equal(parameter, tensors[name].to(wanted))
    assert torch.equal(net.ids, torch.tensor([7, 2**40]))
    (conversion,) = [row for row in receipt.dtypes if not row.startswith("I64")]
    assert conversion.endswith(f" -> {str(wanted)[6:]}")


def test_a_mixed_checkpoint_becomes_one_dtype_and_the_receipt_tells(tmp_path: Path) -> None:
    tensors = _tensors(torch.bfloat16) | {
        "norm.weight": torch.rand(3),
        "norm.bias": torch.rand(3, dtype=torch.float64),
    }
    net, receipt = _load(Net, _saved(tmp_path, tensors), torch.bfloat16)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.bfloat16}
    assert receipt.dtypes == {
        "BF16 -> bfloat16": 2,
        "F32 -> bfloat16": 1,
        "F64 -> bfloat16": 1,
        "I64 -> int64": 1,
    }


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
def test_integers_keep_their_stored_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = _tensors() | {"ids": torch.tensor([1, 0]).to(dtype)}
    net, _ = _load(Net, _saved(tmp_path, tensors), torch.bfloat16)
    assert torch.equal(net.ids, tensors["ids"])
    assert net.ids.dtype == dtype


@pytest.mark.parametrize("attribute", ["_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"])
@pytest.mark.parametrize("declared", [["norm"], "norm", {"norm"}, ("norm",)])
def test_declared_islands_stay_in_fp32(tmp_path: Path, attribute: str, declared: Any) -> None:
    cls = type("Islands", (Net,), {attribute: declared})
    net, receipt = _load(cls, _saved(tmp_path, _tensors()), torch.bfloat16)
    assert (net.norm.weight.dtype, net.norm.bias.dtype) == (torch.float32, torch.float32)
    assert (net.linear.weight.dtype, net.linear.bias.dtype) == (torch.bfloat16, torch.bfloat16)
    assert receipt.dtypes["F32 -> float32"] == 2


def test_an_island_is_a_whole_part_of_a_name() -> None:
    net = build_on_meta(type("Islands", (Net,), {"_keep_in_fp32_modules": ["norm"]}))
    rule = dtype_rule(net, torch.bfloat16)
    assert rule("blocks.0.norm.weight") == torch.float32
    assert rule("blocks.0.norm1.weight") == torch.bfloat16


def test_stored_names_are_renamed_by_the_classs_table(tmp_path: Path) -> None:
    cls = type("Renamed", (Net,), {"checkpoint_names": {r"^model\.": "", r"ln_(\w)": r"norm.\1"}})
    tensors = _tensors()
    stored = {
        f"model.{name}".replace("norm.w", "ln_w").replace("norm.b", "ln_b"): tensor
        for name, tensor in tensors.items()
    }
    assert "model.ln_weight" in stored
    net, _ = _load(cls, _saved(tmp_path, stored))
    assert all(torch.equal(net.state_dict()[name], tensors[name]) for name in tensors)


def test_progress_sums_to_the_total(tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    tensors = _tensors() | {"table": torch.zeros(4)}  # stored in vain, and counted
    _, receipt = _load(Net, _saved(tmp_path, tensors), progress=events.append)
    assert receipt.ignored == ("table",)
    total = 15 * 4 + 16 + 16
    assert {(event.phase, event.total, event.label) for event in events} == {("load", total, "net")}
    done = [event.done for event in events]
    assert done == sorted(set(done))
    assert (done[0], done[-1], len(done)) == (16, total, 6)


@pytest.mark.parametrize(
    "names", [["embed.weight"], ["head.weight"], ["head.weight", "embed.weight"]]
)
def test_a_tie_is_kept(tmp_path: Path, names: list[str]) -> None:
    weight = torch.rand(4, 2)
    net, receipt = _load(Tied, _saved(tmp_path, {name: weight.clone() for name in names}))
    assert net.embed.weight is net.head.weight
    assert torch.equal(net.embed.weight, weight)
    assert receipt.tensors == 1
    assert receipt.bytes_read == 32 * len(names)


def test_a_tied_copy_in_another_dtype_is_a_copy(tmp_path: Path) -> None:
    weight = torch.rand(4, 2).bfloat16()
    folder = _saved(tmp_path, {"embed.weight": weight, "head.weight": weight.float()})
    net, _ = _load(Tied, folder)
    assert torch.equal(net.head.weight, weight.float())


def test_a_tie_with_two_values_is_refused(tmp_path: Path) -> None:
    folder = _saved(tmp_path, {"embed.weight": torch.zeros(4, 2), "head.weight": torch.ones(4, 2)})
    with pytest.raises(CheckpointError, match=r"'embed\.weight' and 'head\.weight' with different"):
        _load(Tied, folder)


def test_tied_buffers_stay_tied(tmp_path: Path) -> None:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = torch.zeros(2)
            self.register_buffer("one", shared)
            self.register_buffer("two", shared)

    net, _ = _load(Buffers, _saved(tmp_path, {"one": torch.ones(2)}))
    assert net.one is net.two
    assert torch.equal(net.two, torch.ones(2))
    assert not isinstance(net.one, nn.Parameter)


def test_the_module_does_not_depend_on_the_file(tmp_path: Path) -> None:
    tensors = _tensors()
    net, _ = _load(Net, _saved(tmp_path, tensors))
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    assert all(torch.equal(net.state_dict()[name], tensors[name]) for name in tensors)


def test_nothing_is_read_when_the_names_do_not_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = _tensors()
    del tensors["norm.bias"]
    module = build_on_meta(Net)
    checkpoint = find_checkpoint(_saved(tmp_path, tensors))
    monkeypatch.setattr("sglang.multimodal_gen.runtime.loader.weights.TensorReader", None)
    with pytest.raises(CheckpointError, match=r"Missing \(1\): \[norm.bias\]"):
        load_weights(module, checkpoint, device="cpu", dtype=torch.float32, label="net")
    assert all(parameter.is_meta for parameter in module.parameters())


def test_a_buffer_computed_from_a_parameter_is_the_porters_fault(tmp_path: Path) -> None:
    class Derived(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("scaled", self.weight.detach() / 2, persistent=False)

    with pytest.raises(PipelineDefinitionError, match="no values for scaled"):
        _load(Derived, _saved(tmp_path, {"weight": torch.ones(2)}))


PEAK = """
import json, re, sys
from pathlib import Path
import torch
from torch import nn
from sglang.multimodal_gen.runtime.loader.checkpoint import find_checkpoint
from sglang.multimodal_gen.runtime.loader.meta_build import build_on_meta
from sglang.multimodal_gen.runtime.loader.weights import load_weights

folder, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
checkpoint = find_checkpoint(folder)
module = build_on_meta(lambda: nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(50)))
warm = torch.ones(8, 8).to(torch.float8_e4m3fn).to(torch.bfloat16) @ torch.ones(8, 8).bfloat16()

def peak():  # of this process image; ru_maxrss would count the parent's before the fork
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

before = peak()
load_weights(module, checkpoint, device="cpu", dtype=dtype, label="net")
after = peak()
size = sum(p.numel() * p.element_size() for p in module.parameters())
print(json.dumps({"peak": (after - before) * 1024, "module": size}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("stored", "wanted"),
    [("float32", "float32"), ("float8_e4m3fn", "bfloat16")],
)
def test_the_peak_is_the_module_and_little_more(tmp_path: Path, stored: str, wanted: str) -> None:
    """CB-092, CB-112: a 50 M parameter checkpoint (200 MB in fp32)."""
    dtype = getattr(torch, stored)
    tensors = {f"{n}.weight": torch.rand(1024, 1024).to(dtype) for n in range(50)}
    _saved(tmp_path, tensors)
    run = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path), wanted],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    seen = json.loads(run.stdout)
    assert seen["peak"] < 1.5 * seen["module"] + 2**24, seen
    assert seen["peak"] > 0.8 * seen["module"], "the measure itself must be able to see the load"
