from __future__ import annotations

from pathlib import Path

import pytest

from sglang.multimodal_gen.runtime.loader.json_file import read_json_object
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError


def test_an_object_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"width": 3, "name": "Größe"}', encoding="utf-8")
    assert read_json_object(path) == {"width": 3, "name": "Größe"}


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_json_object(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b'{"a": 1', "is not JSON"),
        (b"{'a': 1}", "is not JSON"),
        (b"[1, 2]", "must hold a JSON object .*, not list"),
        (b"null", "must hold a JSON object .*, not NoneType"),
        (b"[" * 200_000, "nested too deeply"),
        (b"\xff\xfe{}", "cannot be read"),
        (b"version https://git-lfs.github.com/spec/v1\nsize 3\n", "git lfs pull"),
        (b"<!DOCTYPE html>", "web page"),
    ],
)
def test_anything_else_is_refused_with_a_cause(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=said) as caught:
        read_json_object(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json_object(path) == {"a": 1}


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_json_object(tmp_path)
