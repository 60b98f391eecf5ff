"""The examples run as their reader would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart(tmp_path):
    out = run("examples/quickstart.py", tmp_path)
    assert len(list(tmp_path.glob("*.png"))) == 2
    assert "denoising_stage" in out


def test_progress_and_cancel():
    out = run("examples/progress_and_cancel.py")
    assert "stopped: enough after 10 steps" in out
    assert "done: (128, 128, 3), seed 1" in out


def test_settings(tmp_path):
    sglang = Path(sys.executable).with_name("sglang")
    done = subprocess.run(
        [sglang, "generate", "--config", "examples/settings.yaml", "--output-path", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 2
    assert len(list(tmp_path.glob("*.png"))) == 2
