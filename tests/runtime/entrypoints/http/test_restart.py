"""Jobs outlive `sglang serve`: killed in mid-run, stopped in order, and beside another server."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from runtime.entrypoints.http.test_server_process import served, until_ready

pytestmark = pytest.mark.slow

STEPS = 120
BODY = {"prompt": "a red circle", "num_inference_steps": STEPS, "seed": 7}
ASYNC = {"prefer": "respond-async"}
FINAL = ("completed", "failed", "cancelled")


@contextlib.contextmanager
def serving(state, *flags) -> Iterator[tuple]:
    # No line a request: nobody reads them, and on a slow machine the many looks fill the pipe.
    words = ["--checkpoint-steps", "5", "--warmup-mode", "off", "--request-log", "off"]
    with served("--state-dir", str(state), *words, *flags) as (process, client):
        until_ready(client)
        yield process, client


def post(client: httpx.Client, **body) -> str:
    response = client.post("/v1/images/generations", json=BODY | body, headers=ASYNC)
    assert response.status_code == 202, response.text
    assert response.headers["location"] == f"/v1/jobs/{response.json()['id']}"
    return response.json()["id"]


def job(client: httpx.Client, job_id: str) -> dict:
    response = client.get(f"/v1/jobs/{job_id}")
    assert response.status_code == 200, response.text
    return response.json()


def until(client: httpx.Client, job_id: str, true, seconds: float = 60.0) -> dict:
    deadline = time.monotonic() + seconds
    while not true(record := job(client, job_id)):
        assert time.monotonic() < deadline, record
        time.sleep(0.02)
    return record


def finished(client: httpx.Client, job_id: str) -> dict:
    record = until(client, job_id, lambda r: r["status"] in FINAL)
    assert record["status"] == "completed", record
    return record


def content(client: httpx.Client, job_id: str, index: int = 0) -> bytes:
    response = client.get(f"/v1/jobs/{job_id}/content", params={"index": index})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "image/png"
    return response.content


def files(place) -> list[str]:
    return sorted(p.name for p in place.rglob("*") if p.is_file())


def test_a_killed_server_goes_on_where_it_was_and_makes_the_same_picture(tmp_path):
    """kill -9 in mid-run: same PNG, not from step 0; what waited runs too, by its priority."""
    with serving(tmp_path / "plain") as (_, client):
        wanted = content(client, finished(client, post(client))["id"])
        other = content(client, finished(client, post(client, seed=8))["id"])
        assert wanted != other  # the picture depends on what was asked
    state = tmp_path / "state"
    with serving(state) as (process, client):
        running = post(client)
        waiting = [post(client, seed=8), post(client, seed=9, num_inference_steps=3)]
        # Other settings: the same would share the batch of one that waits.
        last = [post(client, seed=10, priority=-50, num_inference_steps=4)]
        before = until(client, running, lambda r: r["progress"] >= 30)
        assert before["status"] == "in_progress"
        assert before["resumed_at_step"] is None
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert [name for name in files(state) if name.startswith(running)]  # its state lies there
    with serving(state) as (_, client):
        record = finished(client, running)
        assert content(client, running) == wanted
        assert record["attempts"] == 2
        assert 0.2 * STEPS <= record["resumed_at_step"] < STEPS
        times = [finished(client, name)["started_at"] for name in (*waiting, *last)]
        assert content(client, waiting[0]) == other
        assert job(client, waiting[0])["resumed_at_step"] is None  # it had not begun
        # By due time: of the two that waited, the small one may go first; low priority is last.
        assert times[-1] == max(times)
        left = [name for name in files(state) if name.endswith(".safetensors")]
        assert left == []


def test_a_stopped_server_hands_durable_work_to_the_next(tmp_path):
    with serving(tmp_path, "--http-graceful-shutdown-timeout", "0.2") as (process, client):
        running, waiting = post(client), post(client, seed=8, num_inference_steps=3)
        until(client, running, lambda r: r["progress"] >= 20)
        process.terminate()
        assert process.wait(30) == 0
    with serving(tmp_path) as (_, client):
        assert finished(client, running)["resumed_at_step"] > 0
        assert finished(client, waiting)["attempts"] == 2


def test_work_of_a_lost_connection_is_told_and_not_repeated(tmp_path):
    """A client that waited on its connection asks again: running the old request too is waste."""
    with (
        serving(tmp_path) as (process, client),
        client.stream("POST", "/v1/images/generations", json=BODY | {"stream": True}) as response,
    ):
        job_id = response.headers["x-job-id"]
        until(client, job_id, lambda r: r["progress"] >= 10)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    with serving(tmp_path) as (_, client):
        record = until(client, job_id, lambda r: r["status"] in FINAL)
        assert (record["status"], record["error"]["code"]) == ("failed", "interrupted")


def test_two_servers_answer_for_each_other_and_the_living_one_takes_over(tmp_path):
    """CB-034: job, content and cancel across servers; a dead server's work goes on, once."""
    lease = ("--job-lease", "2")
    with serving(tmp_path, *lease) as (first, one), serving(tmp_path, *lease) as (_, two):
        made = post(one, num_inference_steps=2)
        finished(two, made)
        assert content(two, made) == content(one, made)
        stopped = post(one)
        until(two, stopped, lambda r: r["status"] == "in_progress")
        assert two.post(f"/v1/jobs/{stopped}/cancel").status_code == 200
        assert until(one, stopped, lambda r: r["status"] in FINAL, 10)["status"] == "cancelled"
        left = post(one)
        until(one, left, lambda r: r["progress"] >= 30)
        first.send_signal(signal.SIGKILL)
        first.wait(30)
        record = finished(two, left)
        assert record["attempts"] == 2
        assert record["resumed_at_step"] > 0
        assert two.get("/v1/jobs/" + "0" * 32).status_code == 404
