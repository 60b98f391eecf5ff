"""Videos as jobs: true states, cancelling, deleting, expiry, full disks (casebook B, F, G)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from pathlib import Path

import httpx
import pytest

from runtime.entrypoints.http.test_videos import content, frames_of
from runtime.entrypoints.http.video_server import (
    alike,
    describe,
    post,
    serving_clips,
    until,
    write_model,
)
from sglang.multimodal_gen.runtime.entrypoints.http.app import sweep
from sglang.multimodal_gen.runtime.managers import keeping
from sglang.multimodal_gen.runtime.managers.worker import Worker


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return describe(write_model(tmp_path_factory.mktemp("toy")))


@pytest.fixture(scope="module")
def worker(model):
    return Worker(model)


@pytest.fixture
def serve(model, worker):
    with contextlib.ExitStack() as stack:
        yield lambda **flags: stack.enter_context(serving_clips(model, worker, **flags))


@pytest.fixture
def slow_encoder(monkeypatch):
    """Holds every encoding until it is let go."""
    began, go = threading.Event(), threading.Event()
    real = keeping.encode_video

    def encode(*args, **kwargs):
        began.set()
        assert go.wait(20)
        return real(*args, **kwargs)

    monkeypatch.setattr(keeping, "encode_video", encode)
    yield began, go
    go.set()


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_states_are_true(serve):
    """CB-029: one at a time in progress, states in order, progress monotone, 100 when completed."""
    live = serve(step_seconds=0.03)
    ids = [post(live, num_inference_steps=6, fps=8 + k)["id"] for k in range(3)]
    seen = {video_id: [] for video_id in ids}
    while any(not s or s[-1][0] not in ("completed", "failed") for s in seen.values()):
        videos = {v["id"]: v for v in live.http.get("/v1/videos").json()["data"]}
        # One runs; another may be on its way to the disk.
        assert sum(v["status"] == "in_progress" for v in videos.values()) <= 2
        for video_id in ids:
            seen[video_id].append((videos[video_id]["status"], videos[video_id]["progress"]))
        time.sleep(0.005)
    for states in seen.values():
        order = list(dict.fromkeys(state for state, _ in states))
        assert order in (["queued", "in_progress", "completed"], ["in_progress", "completed"])
        progress = [percent for _, percent in states]
        assert progress == sorted(progress)
        assert all((percent == 100) == (state == "completed") for state, percent in states)
        assert len({percent for _, percent in states if 0 < percent < 100}) >= 3


def test_two_hundred_quick_ones_all_end(serve):
    """CB-032."""
    live = serve(max_queued_requests=300)
    small = {"num_frames": 1, "num_inference_steps": 1, "size": "16x16"}
    ids = [post(live, seed=k, **small)["id"] for k in range(200)]
    for video_id in ids:
        assert until(live, video_id, "completed")["progress"] == 100


def test_a_shared_batch_gives_each_what_it_gets_alone(serve):
    """CB-060, with a count of batches as proof."""
    live = serve()
    requests = [{"prompt": "a red ball", "seed": 1}, {"prompt": "the sea", "seed": 2},
                {"prompt": "a red ball", "seed": 3}]  # fmt: skip
    alone = []
    for body in requests:
        video = until(live, post(live, **body)["id"], "completed")
        alone.append(frames_of(content(live, video["id"])))
    assert live.runner.sizes == [1, 1, 1]
    assert not alike(alone[0], alone[2])
    live.runner.step_seconds = 0.3
    live.runner.began.clear()
    first = post(live, num_inference_steps=3)  # other steps: runs alone, and the rest gather
    assert live.runner.began.wait(10)
    live.runner.step_seconds = 0.0
    ids = [post(live, **body)["id"] for body in requests]
    until(live, first["id"], "completed")
    for video_id, expected in zip(ids, alone, strict=True):
        until(live, video_id, "completed")
        clip = frames_of(content(live, video_id))
        assert alike(clip, expected)
    assert live.runner.sizes[3:] == [1, 3]


@pytest.mark.parametrize("route", ["cancel", "delete"])
def test_a_running_one_stops_within_a_step(serve, route, tmp_path):
    """CB-030, CB-068: and the next begins; nothing is left of a deleted one."""
    live = serve(step_seconds=0.05, file_store=str(tmp_path))
    video = post(live, num_inference_steps=50)["id"]
    waiting = post(live, num_inference_steps=2)["id"]
    assert live.runner.began.wait(10)
    if route == "cancel":
        live.http.post(f"/v1/jobs/{video}/cancel")
        assert until(live, video)["status"] == "cancelled"
        error = live.refusal(live.http.get(f"/v1/videos/{video}/content"), 404)
        assert error["code"] == "video_cancelled"
    else:
        reply = live.http.delete(f"/v1/videos/{video}").json()
        assert reply == {"id": video, "object": "video.deleted", "deleted": True}
        live.refusal(live.http.get(f"/v1/videos/{video}"), 404)
    steps = live.runner.steps
    until(live, waiting, "completed")
    assert live.runner.steps <= steps + 2 + 2
    if route == "delete":
        assert [v["id"] for v in live.http.get("/v1/videos").json()["data"]] == [waiting]
        live.refusal(live.http.delete(f"/v1/videos/{video}"), 404)
    assert len(files_in(tmp_path)) == 2  # the other's video and thumbnail


def test_deleting_near_the_end_leaves_no_file(serve, tmp_path):
    """CB-030: fifty times, at any moment."""
    live = serve(file_store=str(tmp_path))
    for k in range(50):
        video = post(live, num_inference_steps=1, num_frames=1)["id"]
        time.sleep(0.0006 * k)
        assert live.http.delete(f"/v1/videos/{video}").status_code == 200
        live.refusal(live.http.get(f"/v1/videos/{video}"), 404)
    live.service.keeping.close(10)
    assert live.http.get("/v1/videos").json()["data"] == []
    assert files_in(tmp_path) == []


def test_it_is_completed_only_when_its_file_is_there(serve, slow_encoder):
    began, go = slow_encoder
    live = serve()
    video = post(live)["id"]
    assert began.wait(10)
    shown = live.http.get(f"/v1/videos/{video}").json()
    assert (shown["status"], shown["completed_at"]) == ("in_progress", None)
    assert shown["progress"] < 100
    error = live.refusal(live.http.get(f"/v1/videos/{video}/content"), 404)
    assert error["code"] == "video_not_ready"
    assert live.http.get("/health").status_code == 200  # CB-078
    go.set()
    until(live, video, "completed")
    assert content(live, video)


def test_the_next_runs_while_one_is_stored_but_not_without_bound(serve, slow_encoder, monkeypatch):
    began, go = slow_encoder
    monkeypatch.setattr(keeping, "_MOST_WAITING", 2)
    live = serve()
    ids = [post(live, fps=10 + k)["id"] for k in range(6)]
    assert began.wait(10)
    deadline = time.monotonic() + 5
    while len(live.runner.sizes) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    assert len(live.runner.sizes) == 3  # one is encoded, one waits, one holds the line up
    go.set()
    for video_id in ids:
        until(live, video_id, "completed")


@pytest.mark.parametrize("route", ["cancel", "delete"])
def test_one_that_is_being_stored_can_be_given_up(serve, slow_encoder, route, tmp_path):
    began, go = slow_encoder
    live = serve(file_store=str(tmp_path))
    video = post(live)["id"]
    assert began.wait(10)
    if route == "cancel":
        assert live.http.post(f"/v1/jobs/{video}/cancel").json()["status"] == "cancelled"
    else:
        live.http.delete(f"/v1/videos/{video}")
    go.set()
    assert live.service.keeping.close(10)
    if route == "cancel":
        assert live.http.get(f"/v1/videos/{video}").json()["status"] == "cancelled"
    assert files_in(tmp_path) == []
    assert until(live, post(live)["id"])["status"] == "completed"


@pytest.mark.slow
def test_a_video_expires_with_its_file(serve, tmp_path):
    """CB-031: the state says so, then the record goes too."""
    live = serve(file_store=str(tmp_path), file_ttl=2, job_ttl=5)
    video = until(live, post(live)["id"], "completed")
    # Counted from when it began to be stored, which takes a moment.
    assert 0 <= video["expires_at"] - video["completed_at"] <= 2
    assert len(files_in(tmp_path)) == 2
    expired = until(live, video["id"], "expired", seconds=5)
    assert expired["expires_at"] <= time.time()
    error = live.refusal(live.http.get(f"/v1/videos/{video['id']}/content"), 404)
    assert error["code"] == "video_expired"
    sweep(live.context)
    assert files_in(tmp_path) == []
    deadline = time.monotonic() + 8
    while live.http.get(f"/v1/videos/{video['id']}").status_code != 404:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert live.http.get("/v1/videos").json()["data"] == []
    assert len(live.service.jobs) == 0


def test_a_full_disk_fails_the_job_clearly(serve, tmp_path, monkeypatch):
    """CB-076: no cut file, no orphan, and the server lives."""
    live = serve(file_store=str(tmp_path))
    writes, fsync = [], os.fsync

    def put(*args):
        writes.append(1)
        if len(writes) > 4:  # the first video's two files and their folder are there by then
            raise OSError(28, "No space left on device")
        return fsync(*args)

    monkeypatch.setattr("os.fsync", put)
    video = until(live, post(live, n=2)["id"])
    monkeypatch.setattr("os.fsync", fsync)
    assert len(writes) > 4
    assert video["status"] == "failed"
    assert video["error"]["code"] == "storage_full"
    assert "could not be stored" in video["error"]["message"]
    assert str(tmp_path) not in video["error"]["message"]
    error = live.refusal(live.http.get(f"/v1/videos/{video['id']}/content"), 404)
    assert error["code"] == "video_failed"
    assert files_in(tmp_path) == []
    assert until(live, post(live)["id"])["status"] == "completed"


def test_a_failure_of_ours_ends_the_job_and_not_the_server(serve, monkeypatch, caplog):
    """CB-072: the encoder raises what nobody foresaw."""
    live = serve()
    real = keeping.encode_video
    monkeypatch.setattr(keeping, "encode_video", lambda *_, **__: 1 / 0)
    video = until(live, post(live)["id"])
    assert (video["status"], video["error"]["code"]) == ("failed", "internal_error")
    assert "division" not in str(video)
    assert "could not be kept" in caplog.text
    monkeypatch.setattr(keeping, "encode_video", real)
    assert until(live, post(live)["id"])["status"] == "completed"


def test_a_time_limit_fails_the_job_and_no_file_is_there(serve, tmp_path):
    """CB-033."""
    live = serve(step_seconds=0.1, file_store=str(tmp_path))
    video = until(live, post(live, num_inference_steps=30, timeout=0.4)["id"])
    assert (video["status"], video["error"]["code"]) == ("failed", "deadline_exceeded")
    assert files_in(tmp_path) == []


def test_uploads_go_when_the_job_has_ended(serve, tmp_path, monkeypatch):
    """CB-075."""
    from runtime.entrypoints.http.conftest import picture

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    live = serve(step_seconds=0.05, file_store=str(tmp_path / "store"))
    files = {"input_reference": ("x.png", picture(), "image/png")}
    form = {"prompt": "x", "num_frames": "1", "num_inference_steps": "4"}
    video = live.http.post("/v1/videos", data=form, files=files).json()["id"]
    assert len(list(tmp_path.glob("sglang-upload-*"))) == 1
    until(live, video, "completed")
    deadline = time.monotonic() + 5
    while list(tmp_path.glob("sglang-upload-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_text_and_picture_requests_alternate(serve):
    """CB-059."""
    from runtime.entrypoints.http.conftest import picture

    live = serve()
    form = {"prompt": "x", "num_frames": "5", "num_inference_steps": "2", "size": "48x32",
            "seed": "1"}  # fmt: skip
    files = {"input_reference": ("x.png", picture((48, 32)), "image/png")}
    clips = []
    for _ in range(5):
        for upload in (None, files):
            fields = {k: (None, v) for k, v in form.items()} | (upload or {})
            video = live.http.post("/v1/videos", files=fields).json()["id"]
            until(live, video, "completed")
            clips.append(content(live, video))
    assert len(set(clips[::2])) == len(set(clips[1::2])) == 1
    assert clips[0] != clips[1]


def test_a_full_queue_is_told(serve):
    live = serve(step_seconds=0.1, max_queued_requests=1)
    running = post(live, num_inference_steps=20)["id"]
    assert live.runner.began.wait(10)
    post(live)
    response = live.http.post("/v1/videos", json={"prompt": "x"})
    assert live.refusal(response, 429)["code"] == "queue_full"
    assert int(response.headers["retry-after"]) >= 1
    live.http.delete(f"/v1/videos/{running}")


def test_whoever_goes_away_does_not_stop_it(serve):
    live = serve(step_seconds=0.05)
    with httpx.Client(base_url=live.url) as client:
        video = client.post("/v1/videos", json={"prompt": "x", "num_frames": 1}).json()["id"]
    assert until(live, video)["status"] == "completed"


def test_no_route_asks_the_store_on_the_event_loop(serve, monkeypatch):
    """A locked database must not stop every other client's answer."""
    live = serve()
    asked = []
    for name in ("get", "list", "update", "delete"):
        real = getattr(live.service.jobs, name)

        def watched(*args, real=real, name=name, **kwargs):
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop()
                asked.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(live.service.jobs, name, watched)
    video_id = until(live, post(live)["id"])["id"]
    place = f"/v1/videos/{video_id}"
    for path in (place, f"{place}/content", f"/v1/videos?after={video_id}"):
        assert live.http.get(path).status_code == 200
    assert live.http.delete(place).status_code == 200
    assert live.http.get(place).status_code == 404
    assert asked == []
