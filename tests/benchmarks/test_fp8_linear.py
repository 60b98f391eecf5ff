"""The benchmark runs: nobody wants to find out on a lent GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_runs_small():
    done = subprocess.run(
        [sys.executable, "benchmarks/fp8_linear.py", "--toy", "--repeats", "2"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "python", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    sides = {row["side"] for row in rows}
    assert sides >= {"bf16", "row", "tensor", "row, input quantised before"}
    for row in rows:
        assert row["relative_l2"] < (5e-3 if row["side"] == "bf16" else 6e-2)
        assert row["side"] == "bf16" or row["relative_l2"] > 5e-3, "it was rounded to eight bits"
