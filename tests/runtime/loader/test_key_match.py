from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sglang.multimodal_gen.runtime.loader.checkpoint import Checkpoint, find_checkpoint
from sglang.multimodal_gen.runtime.loader.key_match import KeyMatch, match_keys, rename_by_table
from sglang.multimodal_gen.runtime.loader.meta_build import build_on_meta
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, PipelineDefinitionError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(3, 2, bias=False)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("table", torch.arange(2.0), persistent=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


NET = {
    "first.weight": torch.zeros(3, 2),
    "first.bias": torch.zeros(3),
    "second.weight": torch.zeros(2, 3),
    "count": torch.zeros(2, dtype=torch.int64),
}


def _stored(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    save_file(tensors, tmp_path / "model.safetensors")
    return find_checkpoint(tmp_path)


def _match(module: nn.Module, checkpoint: Checkpoint, **options: object) -> KeyMatch:
    arguments = {"label": "net", "rename": lambda name: name, **options}
    return match_keys(module, checkpoint, **arguments)  # pyright: ignore[reportArgumentType]


def _without(*names: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in NET.items() if name not in names}


def test_every_stored_tensor_has_its_slot(tmp_path: Path) -> None:
    match = _match(build_on_meta(Net), _stored(tmp_path, NET))
    assert {slot.names: slot.source for slot in match.slots} == {(name,): name for name in NET}
    assert match.ignored == ()


def test_all_faults_are_in_one_message(tmp_path: Path) -> None:
    tensors = _without("first.bias", "second.weight", "count") | {
        "second.weight": torch.zeros(3, 2),
        "extra.one": torch.zeros(1),
        "extra.two": torch.zeros(1),
    }
    with pytest.raises(CheckpointError) as caught:
        _match(build_on_meta(Net), _stored(tmp_path, tensors))
    message = str(caught.value)
    assert "Checkpoint weights do not match 'net' (Net)" in message
    assert "Missing (2): [count, first.bias]" in message
    assert "Unexpected (2): [extra.one, extra.two]" in message
    assert "Misshapen (1): [second.weight (stored 3x2, the model has 2x3)]" in message


def test_a_long_list_of_faults_is_cut(tmp_path: Path) -> None:
    tensors = NET | {f"extra.{number}": torch.zeros(1) for number in range(20)}
    with pytest.raises(CheckpointError, match=r"Unexpected \(20\): .*extra\.7 and 12 more\]"):
        _match(build_on_meta(Net), _stored(tmp_path, tensors))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("first.bias", torch.zeros(3, dtype=torch.int8)),
        ("count", torch.zeros(2)),
        ("count", torch.zeros(2, dtype=torch.float8_e4m3fn)),
    ],
)
def test_integers_are_not_taken_for_floats(tmp_path: Path, name: str, tensor: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match=rf"Misshapen \(1\): \[{name} \(stored as "):
        _match(build_on_meta(Net), _stored(tmp_path, NET | {name: tensor}))


@pytest.mark.parametrize(
    ("extra", "said"),
    [("first.lora_A.weight", "LoRA"), ("first.weight_scale", "quantised"), ("x", "config.json")],
)
def test_the_message_says_what_the_names_look_like(tmp_path: Path, extra: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        _match(build_on_meta(Net), _stored(tmp_path, NET | {extra: torch.zeros(1)}))


def test_a_stored_non_persistent_buffer_is_left_out(tmp_path: Path) -> None:
    match = _match(build_on_meta(Net), _stored(tmp_path, NET | {"table": torch.zeros(2)}))
    assert match.ignored == ("table",)
    assert all(slot.source != "table" for slot in match.slots)


def test_patterns_excuse_unexpected_names(tmp_path: Path) -> None:
    checkpoint = _stored(tmp_path, NET | {"old.scale": torch.zeros(2)})
    match = _match(build_on_meta(Net), checkpoint, ignore_unexpected=[r"^old\."])
    assert match.ignored == ("old.scale",)


def test_patterns_excuse_missing_buffers_but_no_parameter(tmp_path: Path) -> None:
    patterns = ["count", "first.bias"]
    _match(build_on_meta(Net), _stored(tmp_path, _without("count")), ignore_missing=patterns)
    checkpoint = _stored(tmp_path, _without("count", "first.bias"))
    with pytest.raises(CheckpointError, match=r"Missing \(1\): \[first.bias\]"):
        _match(build_on_meta(Net), checkpoint, ignore_missing=patterns)


@pytest.mark.parametrize("stored", [["embed.weight"], ["head.weight"]])
def test_one_of_two_tied_names_is_enough(tmp_path: Path, stored: list[str]) -> None:
    checkpoint = _stored(tmp_path, {name: torch.zeros(4, 2) for name in stored})
    (slot,) = _match(build_on_meta(Tied), checkpoint).slots
    assert slot.names == ("embed.weight", "head.weight")
    assert (slot.source, slot.copies) == (stored[0], ())


def test_a_tied_copy_is_known_as_such(tmp_path: Path) -> None:
    tensors = {"embed.weight": torch.zeros(4, 2), "head.weight": torch.zeros(4, 2)}
    (slot,) = _match(build_on_meta(Tied), _stored(tmp_path, tensors)).slots
    assert (slot.source, slot.copies) == ("embed.weight", ("head.weight",))


def test_a_misshapen_copy_is_found(tmp_path: Path) -> None:
    tensors = {"embed.weight": torch.zeros(4, 2), "head.weight": torch.zeros(2, 4)}
    with pytest.raises(CheckpointError, match="Misshapen"):
        _match(build_on_meta(Tied), _stored(tmp_path, tensors))


def test_a_missing_tie_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Missing \(1\): \[embed.weight\]"):
        _match(build_on_meta(Tied), _stored(tmp_path, {"x": torch.zeros(1)}))


def test_two_stored_names_for_one_slot_are_refused(tmp_path: Path) -> None:
    tensors = NET | {"model.count": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(CheckpointError, match=r"'count' and 'model\.count', which both mean"):
        _match(
            build_on_meta(Net),
            _stored(tmp_path, tensors),
            rename=lambda name: name.removeprefix("model."),
        )


def test_names_are_renamed_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    seen: list[str] = []
    tensors = {f"layers.{number}": torch.zeros(1) for number in (10, 2, 1)}

    def rename(name: str) -> str:
        seen.append(name)
        return name

    with pytest.raises(CheckpointError):
        _match(nn.Module(), _stored(tmp_path, tensors), rename=rename)
    assert seen == ["layers.1", "layers.2", "layers.10"]


def test_a_table_renames_in_its_order() -> None:
    rename = rename_by_table({r"^net\.": "", r"blocks\.(\d+)\.": r"layers.\1.", "layers": "l"}, "X")
    assert rename("net.blocks.3.weight") == "l.3.weight"
    assert rename("other") == "other"


def test_a_table_with_a_bad_pattern_is_the_porters_fault() -> None:
    with pytest.raises(PipelineDefinitionError, match=r"Net\.checkpoint_names holds '\('"):
        rename_by_table({"(": ""}, "Net")
