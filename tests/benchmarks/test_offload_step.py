"""The offload benchmark runs as on a GPU, in miniature."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_offload_benchmark_runs_and_predictions_are_equal(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/offload_step.py", "--toy", "--json", file],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    assert [size["max_difference"] for size in record["sizes"]] == [0, 0]
    assert record["prefetch_misses"] == 0
    assert 0 < record["peak_gib"] < record["host_gib"]
    assert json.loads(done.stdout.splitlines()[-1]) == record
