"""Jobs as server-sent events."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time

import httpx
import pytest

from runtime.entrypoints.http.conftest import SlowRunner
from sglang.multimodal_gen.configs.task_type import DataType
from sglang.multimodal_gen.runtime.entrypoints.http import job_events
from sglang.multimodal_gen.runtime.managers.service import WorkOrder
from sglang.multimodal_gen.runtime.utils.errors import InternalError, StoreUnavailable

SETTINGS = {"prompt": "a fox", "height": 48, "width": 64, "max_sequence_length": 16}


def submit(live, steps=2):
    settings = SETTINGS | {"num_inference_steps": steps}
    order = WorkOrder(kind="image_generation", settings=settings, data_type=DataType.IMAGE)
    return live.service.submit(order)


def heard(live, job_id, last_event_id=None) -> list[dict]:
    """All events of a stream until it ends: id, event, data."""
    headers = {} if last_event_id is None else {"last-event-id": last_event_id}
    with live.http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return parsed(response.read().decode())


def parsed(text: str) -> list[dict]:
    found = []
    for block in text.split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in block.splitlines() if line[:1] not in ("", ":")
        )
        if "data" in fields:
            found.append(fields | {"data": json.loads(fields["data"])})
    return found


def test_a_job_is_told_from_where_it_is_to_its_end(start, monkeypatch):
    monkeypatch.setattr(job_events, "POLL_SECONDS", 0.01)
    live = start(SlowRunner(step_seconds=0.03))
    first, second = submit(live, 20), submit(live, 3)
    live.runner.began.wait(5)
    events = heard(live, second.id)
    assert events[0]["event"] == "job.queued"  # a snapshot, and true: the first one runs
    assert events[-1]["event"] == "job.completed"
    assert [e["data"]["status"] for e in events] == [
        e["event"].removeprefix("job.") for e in events
    ]
    progress = [event["data"]["progress"] for event in events]
    assert progress == sorted(progress)
    assert progress[-1] == 100
    assert {event["data"]["id"] for event in events} == {second.id}
    assert len({event["id"] for event in events}) == len(events) >= 3
    assert heard(live, first.id)[-1]["data"]["results"][0].keys() >= {"seed"}


def test_who_comes_back_hears_only_what_is_new(start, monkeypatch):
    monkeypatch.setattr(job_events, "POLL_SECONDS", 0.01)
    live = start()
    job = submit(live)
    job.result.result(5)
    assert [event["id"] for event in heard(live, job.id)] == ["completed.100"]
    assert [event["id"] for event in heard(live, job.id, "in_progress.40")] == ["completed.100"]
    assert [event["id"] for event in heard(live, job.id, "nonsense")] == ["completed.100"]
    answer = live.http.get(f"/v1/jobs/{job.id}/events", headers={"last-event-id": "completed.100"})
    assert (answer.status_code, answer.content) == (204, b"")


def test_failed_and_cancelled_are_ends(start):
    live = start()
    live.runner.fail = lambda batch: InternalError("secret")
    job = submit(live)
    with pytest.raises(InternalError):
        job.result.result(5)
    (event,) = heard(live, job.id)
    assert event["event"] == "job.failed"
    assert event["data"]["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps(event)


def test_a_cancelled_job_ends_its_stream_at_once(start, monkeypatch):
    monkeypatch.setattr(job_events, "POLL_SECONDS", 0.01)
    live = start(SlowRunner(step_seconds=0.02))
    job = submit(live, 500)
    live.runner.began.wait(5)
    threading.Timer(0.2, live.service.cancel, [job.id]).start()
    begin = time.perf_counter()
    assert heard(live, job.id)[-1]["event"] == "job.cancelled"
    assert time.perf_counter() - begin < 3


def test_an_unknown_job_is_404_and_a_forgotten_one_an_event(start, monkeypatch):
    monkeypatch.setattr(job_events, "POLL_SECONDS", 0.01)
    live = start(SlowRunner(step_seconds=0.02))
    live.refusal(live.http.get("/v1/jobs/nothing/events"), 404)
    job = submit(live, 100)
    threading.Timer(0.2, live.service.jobs.delete, [job.id]).start()
    event = heard(live, job.id)[-1]
    assert event["event"] == "error"
    assert event["data"]["error"]["code"] == "not_found"


def test_a_quiet_stream_says_that_it_lives(start, monkeypatch):
    monkeypatch.setattr(job_events, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(job_events, "KEEP_ALIVE_SECONDS", 0.05)
    live = start(SlowRunner(step_seconds=0.4))
    job = submit(live, 1)
    with live.http.stream("GET", f"/v1/jobs/{job.id}/events") as response:
        text = response.read().decode()
    assert text.startswith("retry: ")
    assert text.count(": still at work") >= 3


def test_listeners_that_leave_are_forgotten(start, monkeypatch):
    """CB-077: streams that nobody reads do not pile up."""
    monkeypatch.setattr(job_events, "POLL_SECONDS", 0.01)
    live = start(SlowRunner(step_seconds=0.02))
    looks = []
    look = live.service.jobs.get
    monkeypatch.setattr(live.service.jobs, "get", lambda job_id: (looks.append(1), look(job_id))[1])
    job = submit(live, 500)
    live.runner.began.wait(5)
    for _ in range(5):
        with live.http.stream("GET", f"/v1/jobs/{job.id}/events") as response:
            next(response.iter_lines())
    time.sleep(0.2)
    looks.clear()
    time.sleep(0.2)
    assert not looks
    live.service.cancel(job.id)


def test_a_listener_does_not_hold_a_server_that_stops(start):
    live = start(SlowRunner(step_seconds=0.02))
    job = submit(live, 500)
    live.runner.began.wait(5)
    ended = threading.Event()

    def listen():
        with contextlib.suppress(httpx.HTTPError):
            heard(live, job.id)
        ended.set()

    threading.Thread(target=listen).start()
    time.sleep(0.3)
    # The record stays unfinished for ever, as that of another server on the same store would.
    service = live.service
    service.jobs.update = lambda *args, **changes: None
    live.context.lifecycle.stop_taking()
    service.scheduler.abandon()
    assert ended.wait(3)


def test_a_store_that_does_not_answer_for_a_moment_ends_no_stream(start, monkeypatch):
    monkeypatch.setattr(job_events, "POLL_SECONDS", 0.01)
    live = start(SlowRunner(step_seconds=0.02))
    job = submit(live, 10)
    get, failures = live.service.jobs.get, [1] * 3
    looks = itertools.count()

    def sometimes(job_id):
        if next(looks) > 2 and failures:
            failures.pop()
            raise StoreUnavailable("the database is locked")
        return get(job_id)

    monkeypatch.setattr(live.service.jobs, "get", sometimes)
    assert heard(live, job.id)[-1]["event"] == "job.completed"
    assert not failures
