from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sglang.multimodal_gen.runtime.loader.checkpoint import find_checkpoint
from sglang.multimodal_gen.runtime.loader.tensor_reader import TensorReader
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

TENSORS = {f"t{number}": torch.full((5,), float(number)) for number in range(6)}


@pytest.mark.parametrize("window", [1, 40, 1 << 20])
def test_tensors_are_read_whatever_the_window(tmp_path: Path, window: int) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = find_checkpoint(tmp_path)
    with TensorReader(window_bytes=window) as reader:
        for name, expected in TENSORS.items():
            assert torch.equal(reader.read(name, checkpoint.tensors[name]), expected)
        assert reader.bytes_read == checkpoint.total_bytes == 120


def test_a_file_that_vanished_meanwhile_is_told(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    stored = find_checkpoint(tmp_path).tensors["t0"]
    (tmp_path / "model.safetensors").unlink()
    with TensorReader() as reader, pytest.raises(CheckpointError, match="cannot be read"):
        reader.read("t0", stored)


def test_a_file_that_changed_meanwhile_is_told(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    stored = find_checkpoint(tmp_path).tensors["t0"]
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    with TensorReader() as reader, pytest.raises(CheckpointError, match="'t0'"):
        reader.read("t0", stored)
