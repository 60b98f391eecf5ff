"""The examples run as their reader would run them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.train_demo_model.evaluate import evaluate, report
from examples.train_demo_model.grade import grade
from examples.train_demo_model.phrases import parse
from sglang.multimodal_gen import DiffGenerator

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


@pytest.mark.slow
def test_the_demo_picture_is_what_its_prompt_says(tmp_path):
    recipe = (ROOT / "Makefile").read_text()
    prompt = re.findall(r'--prompt "([^"]+)"', recipe)[0]
    seed = int(re.findall(r"generate --seed (\d+)", recipe)[0])
    with DiffGenerator.from_pretrained("demo", device="cpu") as generator:
        picture = generator.generate(prompt=prompt, seed=seed)[0]
    assert grade(picture.array, parse(prompt)) == []
    wrong = parse(prompt.replace("above", "below"))
    assert grade(picture.array, wrong), "a grader that finds nothing wrong proves nothing"


@pytest.mark.slow
def test_nine_of_ten_held_out_prompts_are_drawn_as_asked():
    begin = time.monotonic()
    result = evaluate("demo", prompts=200, steps=20, seed=0, batch=8, device="cpu")
    assert result.right >= 180, report(result, time.monotonic() - begin, result.by_form())


@pytest.mark.slow
def test_a_picture_takes_15_seconds_from_the_start_and_5_after_loading(tmp_path):
    begin = time.monotonic()
    sglang = Path(sys.executable).with_name("sglang")
    done = subprocess.run(
        [sglang, "generate", "--prompt", "a red circle", "--json", "--output-path", tmp_path],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds = time.monotonic() - begin
    assert sum(json.loads(done.stdout)["timings"].values()) <= 5
    assert seconds <= 15
