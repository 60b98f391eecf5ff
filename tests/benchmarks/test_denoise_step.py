"""The step benchmark's verdict on sides with CUDA graphs."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GRAPHED = ["this runtime, fp8, graphs", "this runtime, graphs"]


@pytest.mark.parametrize("wrong", [None, *range(2)])
def test_each_graphed_side_must_equal_its_direct_one(wrong, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = importlib.import_module("denoise_step")
    made = []

    def recorded(direct):
        """What replays a loop; one of them has lost a number."""
        side, number = with_graphs(direct), len(made)
        made.append(direct)
        loop = side.loop
        monkeypatch.setattr(side, "loop", lambda *args: loop(*args) + (number == wrong))
        return side

    with_graphs = script._with_graphs
    monkeypatch.setattr(script, "_with_graphs", recorded)
    path = tmp_path / "out.json"
    words = ["--toy", "--graphs", "--quantization", "fp8", "--steps", "2", "--rounds", "1"]
    assert script.main([*words, "--json", str(path)]) == (wrong is not None)
    told = json.loads(path.read_text())["graphs"]
    differ = [] if wrong is None else [GRAPHED[wrong]]
    assert list(told) == GRAPHED
    assert [name for name, facts in told.items() if not facts["equal"]] == differ
    error = capsys.readouterr().err
    assert [name for name in GRAPHED if name in error] == differ
