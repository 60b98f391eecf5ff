from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from sglang.multimodal_gen.runtime.loader.safetensors_header import StoredTensor, read_header
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

F32_2X3: dict[str, Any] = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def _write(path: Path, header: object, body: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def _refusal(path: Path) -> str:
    """The message for a file that must be refused and must stay as it was."""
    before = path.read_bytes()
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert path.read_bytes() == before
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_a_file_of_the_library_is_read(path: Path) -> None:
    tensors = {
        "b.weight": torch.zeros(2, 3, dtype=torch.bfloat16),
        "a": torch.zeros(4, dtype=torch.int64),
        "empty": torch.zeros(0, 5),
        "scalar": torch.tensor(1.5),
        "fp8": torch.zeros(3, dtype=torch.float8_e4m3fn),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert set(header) == set(tensors)
    assert {(n, s.dtype, s.shape, s.nbytes) for n, s in header.items()} == {
        ("b.weight", "BF16", (2, 3), 12),
        ("a", "I64", (4,), 32),
        ("empty", "F32", (0, 5), 0),
        ("scalar", "F32", (), 4),
        ("fp8", "F8_E4M3", (3,), 3),
    }


def test_offsets_count_from_the_start_of_the_file(path: Path) -> None:
    save_file({"x": torch.tensor([3, 4], dtype=torch.uint8)}, path)
    stored = read_header(path)["x"]
    assert path.read_bytes()[stored.offset : stored.offset + stored.nbytes] == bytes([3, 4])


def test_a_file_without_tensors_is_a_file(path: Path) -> None:
    assert read_header(_write(path, {})) == {}


def test_an_empty_file_is_told_as_such(path: Path) -> None:
    path.touch()
    assert "is empty (0 bytes)" in _refusal(path)


@pytest.mark.parametrize("missing", [1, 4, 12, 23, 24])
def test_a_cut_in_the_tensors_counts_the_missing_bytes(path: Path, missing: int) -> None:
    save_file({"x": torch.arange(6, dtype=torch.float32)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - missing])
    assert f"{missing} of {len(whole)} bytes are missing" in _refusal(path)


@pytest.mark.parametrize("kept", [9, 20, 40])
def test_a_cut_in_the_header_counts_the_missing_bytes(path: Path, kept: int) -> None:
    save_file({"x": torch.arange(6, dtype=torch.float32)}, path)
    whole = path.read_bytes()
    header_end = 8 + struct.unpack("<Q", whole[:8])[0]
    path.write_bytes(whole[:kept])
    assert f"{header_end - kept} bytes of the header" in _refusal(path)


@pytest.mark.parametrize("kept", [1, 7, 8])
def test_a_cut_in_the_length_is_a_truncation(path: Path, kept: int) -> None:
    save_file({"x": torch.arange(6, dtype=torch.float32)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    assert "truncated" in _refusal(path)


@given(kept=st.integers(0, 10_000))
def test_no_prefix_of_a_file_is_taken_for_a_file(
    tmp_path_factory: pytest.TempPathFactory, kept: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "model.safetensors"
    save_file({"x": torch.arange(6, dtype=torch.float32), "y": torch.ones(7)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: kept % len(whole)])
    with pytest.raises(CheckpointError):
        read_header(path)


def test_an_lfs_pointer_is_recognised(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 246144152\n")
    message = _refusal(path)
    assert "246144152 bytes" in message
    assert "git lfs pull" in message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<!DOCTYPE html><html><body>Not found</body></html>", "web page"),
        (b"\n\n  <html>", "web page"),
        (b'{"error": "Repository not found"}', "JSON text"),
        (b"{}", "JSON text"),
        (b"PK\x03\x04" + bytes(60), "pickle"),
        (b"\x80\x04\x95" + bytes(60), "pickle"),
        (b"GGUF\x03\x00\x00\x00" + bytes(60), "GGUF"),
    ],
)
def test_other_formats_are_recognised(path: Path, content: bytes, said: str) -> None:
    path.write_bytes(content)
    assert said in _refusal(path)


@pytest.mark.parametrize("claimed", [2**63, 2**64 - 1, 100_000_001, 1])
def test_an_absurd_length_is_refused(path: Path, claimed: int) -> None:
    path.write_bytes(struct.pack("<Q", claimed) + b"{" + bytes(100))
    assert f"claim a header of {claimed} bytes" in _refusal(path)


@pytest.mark.parametrize("claimed", [2**63, 90_000_000])
def test_a_claimed_length_is_never_allocated(path: Path, claimed: int) -> None:
    path.write_bytes(struct.pack("<Q", claimed) + b"{" + bytes(100))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_length_without_a_header_is_refused(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 50) + b"\x00" * 200)
    assert "no JSON header" in _refusal(path)


@pytest.mark.parametrize("header", [b'{"x": oops}', b'{"x": "\xff\xfe"}', b"{" + b"[" * 100_000])
def test_a_header_that_is_not_json_is_refused(path: Path, header: bytes) -> None:
    assert "not JSON" in _refusal(_write(path, header))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (None, "no dtype, shape or data_offsets"),
        ({"dtype": "F32", "shape": [6]}, "no dtype, shape or data_offsets"),
        (F32_2X3 | {"dtype": "F31"}, "unknown dtype 'F31'"),
        (F32_2X3 | {"dtype": ["F32"]}, "unknown dtype"),
        (F32_2X3 | {"shape": [-2, -3]}, "impossible shape"),
        (F32_2X3 | {"shape": [2.0, 3]}, "impossible shape"),
        (F32_2X3 | {"shape": 6}, "impossible shape"),
        (F32_2X3 | {"shape": [2**62, 2**62]}, "does not fill"),
        (F32_2X3 | {"data_offsets": [24, 0]}, "impossible data_offsets"),
        (F32_2X3 | {"data_offsets": [0, 24, 48]}, "impossible data_offsets"),
        (F32_2X3 | {"data_offsets": [0, 20]}, "does not fill"),
    ],
)
def test_an_impossible_entry_is_refused(path: Path, entry: object, said: str) -> None:
    message = _refusal(_write(path, {"the.tensor": entry}, bytes(24)))
    assert "'the.tensor'" in message
    assert said in message


@pytest.mark.parametrize(("begin", "said"), [(12, "overlaps"), (28, "gap"), (0, "overlaps")])
def test_tensors_must_lie_end_to_end(path: Path, begin: int, said: str) -> None:
    second = F32_2X3 | {"data_offsets": [begin, begin + 24]}
    message = _refusal(_write(path, {"first": F32_2X3, "second": second}, bytes(52)))
    assert "'second'" in message
    assert said in message


def test_a_gap_before_the_first_tensor_is_refused(path: Path) -> None:
    message = _refusal(_write(path, {"x": F32_2X3 | {"data_offsets": [8, 32]}}, bytes(32)))
    assert "gap" in message


def test_trailing_bytes_are_refused(path: Path) -> None:
    assert "5 bytes longer" in _refusal(_write(path, {"x": F32_2X3}, bytes(29)))


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path)


def test_an_absent_file_is_refused(path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(path)


def test_a_minimal_file_by_hand(path: Path) -> None:
    """Proves that the refusals above are not refusals of the helper that writes them."""
    header = read_header(_write(path, {"x": F32_2X3, "__metadata__": {"a": "b"}}, bytes(24)))
    start = path.stat().st_size - 24
    assert header == {"x": StoredTensor(path, "F32", (2, 3), start, 24)}
