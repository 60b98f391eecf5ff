"""The benchmark runs, and its lines say that ranks computed what one rank does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_runs_on_cpus(tmp_path):
    lines = tmp_path / "lines.json"
    layouts = ["ulysses=2", "ring=2", "cfg=2"]
    command = [
        sys.executable, "benchmarks/parallel_step.py", "--toy", "--height", "48", "--width", "80",
        "--rounds", "1", "--json", str(lines), "--layout", *layouts,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": "python", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [record["layout"] for record in records] == layouts
    assert all(record["ranks_equal"] for record in records)
    assert all(record["relative_l2_latents"] < 1e-5 for record in records)
    assert records[0]["messages_a_step"]["ulysses"] == {"all_to_all": 8.0}
    assert records[1]["messages_a_step"]["ring"] == {"exchange": 4.0}
    assert records[2]["messages_a_step"]["cfg"] == {"all_gather": 1.0}
    assert [record["true_cfg"] for record in records] == [False, False, True]
