"""`sglang serve` as a process with a model that makes videos, from a package of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from runtime.entrypoints.http import test_server_process
from runtime.entrypoints.http.test_server_process import served, until_ready
from runtime.entrypoints.http.test_videos import frames_of
from runtime.entrypoints.http.video_server import SMALL, alike, write_model

TESTS = Path(__file__).parents[3]
pytestmark = pytest.mark.slow


@pytest.fixture
def package(monkeypatch):
    """The toy family, found by every process through the variable."""
    plain = test_server_process.environment

    def environment() -> dict[str, str]:
        found = plain()
        path = f"{found['PYTHONPATH']}{os.pathsep}{TESTS}"
        return found | {"PYTHONPATH": path, "SGLANG_EXTERNAL_MODEL_PACKAGE": "toy_clips"}

    monkeypatch.setattr(test_server_process, "environment", environment)


def finished(client, video_id: str) -> dict:
    deadline = time.monotonic() + 60
    while True:
        video = client.get(f"/v1/videos/{video_id}").json()
        if video["status"] not in ("queued", "in_progress"):
            return video
        assert time.monotonic() < deadline, video
        time.sleep(0.02)


@pytest.mark.parametrize(
    "flags", [(), ("--num-gpus", "2", "--dp-size", "2")], ids=["one rank", "two ranks"]
)
def test_videos_from_a_real_server(package, tmp_path, flags):
    """CB-127: on two ranks the clips come from other processes."""
    folder = write_model(tmp_path)
    store = tmp_path / "store"
    with served(
        "--model-path", str(folder), "--device", "cpu", "--file-store", str(store), *flags
    ) as (process, client):
        assert until_ready(client)[0] == 503
        assert client.get("/v1/models").json()["data"][0]["id"] == "toy-clips"
        videos = [client.post("/v1/videos", json=SMALL | {"seed": k}).json() for k in (1, 2, 1)]
        assert {video["status"] for video in videos} == {"queued"}
        clips = []
        for video in videos:
            assert finished(client, video["id"])["status"] == "completed"
            clips.append(client.get(f"/v1/videos/{video['id']}/content").content)
        first, other, again = map(frames_of, clips)
        assert first.shape == (5, 32, 48, 3)
        assert alike(first, again)
        assert not alike(first, other)
        assert len(stored(store)) == 6
        running = client.post("/v1/videos", json=SMALL | {"num_inference_steps": 100}).json()
        while client.get(f"/v1/videos/{running['id']}").json()["progress"] < 5:
            time.sleep(0.001)
        process.terminate()
        assert process.wait(60) == 0
    assert len(stored(store)) in (6, 8)  # the running one was finished, or stopped in time


def stored(store):
    """The files of results; those of inputs and of states are other folders'."""
    return [place for place in store.glob("*/files/*") if place.is_file()]


def test_a_missing_extra_ends_the_start(package, tmp_path):
    """Before a weight is loaded, in one line."""
    folder = write_model(tmp_path)
    blocked = tmp_path / "site"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text(
        "import importlib.util as u\n_find = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'av' else _find(name, package)\n"
    )
    environment = test_server_process.environment()
    environment["PYTHONPATH"] = f"{blocked}{os.pathsep}{environment['PYTHONPATH']}"
    import subprocess

    done = subprocess.run(
        [*test_server_process.COMMAND, "--port", "0", "--model-path", str(folder)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "pip install 'sglang-diffusion[video]'" in done.stderr
    assert "Traceback" not in done.stderr
