"""Folders that are whole or absent."""

from __future__ import annotations

import os

import pytest

from sglang.multimodal_gen.runtime.utils.atomic_file import write_new_folder
from sglang.multimodal_gen.runtime.utils.errors import OutputError

FILES = {"a.png": b"1", "b.png": b"2"}


def test_a_folder_never_takes_anothers_name(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/precious").write_bytes(b"")
    (tmp_path / "x-2").write_bytes(b"a file")
    assert write_new_folder(tmp_path / "x", FILES) == tmp_path / "x-3"
    assert write_new_folder(tmp_path / "x", FILES) == tmp_path / "x-4"
    assert {p.name: p.read_bytes() for p in (tmp_path / "x-3").iterdir()} == FILES
    assert [p.name for p in (tmp_path / "x").iterdir()] == ["precious"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x", "x-2", "x-3", "x-4"]


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    calls = []

    def full(*_):
        calls.append(1)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        write_new_folder(tmp_path / "x", FILES)
    assert list(tmp_path.iterdir()) == []
