"""The benchmark runs: nobody wants to find out on a lent GPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_runs_small_on_two_ranks(tmp_path):
    path = tmp_path / "out.json"
    command = [sys.executable, "benchmarks/vae_decode.py", "--toy", "--ranks", "2"]
    done = subprocess.run(
        [*command, "--json", str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "python", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["mode"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["plain", "tiled", "spatial_shard", "diffusers"]
    assert rows["plain"]["relative_l2"] == 0
    assert rows["tiled"]["relative_l2"] > 0.01
    assert rows["spatial_shard"]["relative_l2"] < 1e-5
    assert rows["spatial_shard"]["exchanges"]["exchange"] > 20
    assert all(row["median_ms"] > 0 for row in rows.values())


@pytest.mark.parametrize("model", ["wan2.1-1.3b", "qwen-image"])
def test_it_compares_with_diffusers_on_the_same_weights(model, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "out.json"
    script = importlib.import_module("vae_decode")
    latents = script._latents
    # Some pixels beyond -1..1: where one side cuts them, the other must too.
    monkeypatch.setattr(script, "_latents", lambda *args: 1e4 * latents(*args))
    words = ["--toy", "--model", model, "--height", "32", "--width", "48", "--frames", "5",
             "--modes", "plain", "diffusers", "--json", str(path)]  # fmt: skip
    assert script.main(words) == 0
    rows = {row["mode"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["plain", "diffusers"]
    assert rows["diffusers"]["relative_l2"] < 1e-6
    assert all(row["median_ms"] > 0 for row in rows.values())
