"""Jobs that need no connection: keys, answers without waiting, inputs, webhooks, expiry."""

from __future__ import annotations

import base64
import dataclasses
import io
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from PIL import Image

from runtime.entrypoints.http.conftest import SMALL, SlowRunner, picture
from runtime.entrypoints.http.test_image_edits import FIELDS, Looking
from runtime.managers.test_webhooks import SECRET, Receiver
from sglang.multimodal_gen.runtime.entrypoints.http.app import sweep
from sglang.multimodal_gen.runtime.managers.job_keeper import JobKeeper
from sglang.multimodal_gen.runtime.managers.storage import database
from sglang.multimodal_gen.runtime.utils.errors import (
    InternalError,
    QueueFull,
    StoreUnavailable,
)

ASYNC = {"prefer": "respond-async"}
FINAL = ("completed", "failed", "cancelled")


@pytest.fixture
def durable(start, tmp_path):
    """Servers on one job store in a folder."""

    def run(runner=None, model=None, **flags):
        own = {"job_store": None, "state_dir": str(tmp_path / "state"), "job_lease": 1.0}
        return start(runner, model, **own | flags)

    return run


def post(live, *, headers=ASYNC, **body):
    json = {"prompt": "a fox", "seed": 3} | SMALL | body
    return live.http.post("/v1/images/generations", json=json, headers=headers)


def until_final(live, job_id, seconds=20.0):
    deadline = time.monotonic() + seconds
    while True:
        record = live.http.get(f"/v1/jobs/{job_id}").json()
        if record["status"] in FINAL:
            return record
        assert time.monotonic() < deadline, record
        time.sleep(0.01)


def stored(tmp_path: Path) -> list[Path]:
    return [p for p in (tmp_path / "state" / "files").rglob("*") if p.is_file()]


# Answers without waiting.


def test_a_job_is_answered_at_once_and_keeps_what_it_made(durable):
    live = durable(SlowRunner(step_seconds=0.05))
    response = post(live, n=2, output_format="webp")
    assert response.status_code == 202
    assert response.headers["preference-applied"] == "respond-async"
    assert response.json()["status"] in ("queued", "in_progress")
    job_id = response.json()["id"]
    assert live.refusal(live.http.get(f"/v1/jobs/{job_id}/content"), 409)["code"] == "not_completed"
    record = until_final(live, job_id)
    assert [result["seed"] for result in record["results"]] == [3, 4]
    for index, result in enumerate(record["results"]):
        content = live.http.get(f"/v1/jobs/{job_id}/content", params={"index": index})
        assert content.headers["content-type"] == result["content_type"] == "image/webp"
        assert len(content.content) == result["bytes"]
        assert live.http.get(f"/v1/files/{result['file_id']}").content == content.content
    live.refusal(live.http.get(f"/v1/jobs/{job_id}/content", params={"index": 2}), 400)
    plain = live.generate().json()["id"]
    assert live.refusal(live.http.get(f"/v1/jobs/{plain}/content"), 404)["code"] == "not_kept"
    live.refusal(live.http.get("/v1/jobs/none/content"), 404)


@pytest.mark.slow
def test_two_hundred_fast_jobs_all_end(durable):
    """CB-032"""
    live = durable(max_queued_requests=300)
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda n: post(live, seed=n).json()["id"], range(200)))
    assert len(set(ids)) == 200
    assert {until_final(live, job_id)["status"] for job_id in ids} == {"completed"}


def test_without_files_nothing_can_be_kept(start):
    live = start(file_store="off")
    assert live.refusal(post(live))["code"] == "no_file_store"
    error = live.refusal(post(live, headers={"idempotency-key": "k"}))
    assert error["code"] == "no_file_store"
    assert live.generate().status_code == 200


# Keys.


def test_the_same_request_under_a_key_is_made_once(durable):
    live = durable()
    key = {"idempotency-key": "order 66"}
    body = {"seed": None}  # drawn at random: the second answer can only be the first one's
    first = post(live, headers=key, **body)
    second = post(live, headers=key, **body)
    assert first.status_code == second.status_code == 200
    assert first.json()["data"] == second.json()["data"]
    assert first.json()["id"] == second.json()["id"]
    assert len(live.runner.batches) == 1
    assert post(live, headers=key | ASYNC, **body).json()["id"] == first.json()["id"]
    assert (
        post(live, headers={"idempotency-key": "another"}, **body).json()["id"]
        != (first.json()["id"])
    )


def test_another_request_under_the_same_key_is_refused(durable):
    live = durable()
    key = {"idempotency-key": "k"}
    assert post(live, headers=key).status_code == 200
    error = live.refusal(post(live, headers=key, seed=4), 422)
    assert (error["param"], error["code"]) == ("Idempotency-Key", "idempotency_key_reused")
    assert len(live.runner.batches) == 1
    for bad in ("", "x" * 256, "a\tb"):
        assert live.refusal(post(live, headers={"idempotency-key": bad}))["param"] == (
            "Idempotency-Key"
        )
    live.refusal(post(live, headers=key, stream=True))


def test_requests_at_once_under_one_key_share_a_job(durable):
    live = durable(SlowRunner(step_seconds=0.1))
    with ThreadPoolExecutor(6) as pool:
        key = {"idempotency-key": "k"}
        replies = list(pool.map(lambda _: post(live, headers=key), range(6)))
    assert {reply.status_code for reply in replies} == {200}
    assert len({reply.json()["id"] for reply in replies}) == 1
    assert len({reply.json()["data"][0]["b64_json"] for reply in replies}) == 1
    assert len(live.runner.batches) == 1


def test_a_refused_request_leaves_its_key_free_and_a_failed_one_does_not(durable):
    live = durable()
    key = {"idempotency-key": "k"}
    live.refusal(post(live, headers=key, num_inference_steps=0))
    live.runner.fail = lambda batch: InternalError("broken")
    assert post(live, headers=key).status_code == 500
    live.runner.fail = lambda batch: None
    again = post(live, headers=key)
    assert (again.status_code, again.json()["error"]["code"]) == (500, "internal_error")
    assert len(live.runner.batches) == 1


def test_a_key_survives_a_restart_and_holds_on_another_server(durable, tmp_path):
    live = durable()
    key = {"idempotency-key": "k"}
    first = post(live, headers=key)
    other = durable()
    second = post(other, headers=key)
    assert second.json()["data"] == first.json()["data"]
    assert other.runner.batches == []
    assert other.refusal(post(other, headers=key, seed=4), 422)


def test_a_client_that_comes_back_with_its_key_finds_its_work_going_on(durable):
    live = durable(SlowRunner(step_seconds=0.4))
    client = live.openai(timeout=0.3)
    options = {"prompt": "a fox", "size": "64x48", "extra_headers": {"Idempotency-Key": "k"},
               "extra_body": {"num_inference_steps": 4, "max_sequence_length": 16}}  # fmt: skip
    with pytest.raises(openai.APITimeoutError):
        client.images.generate(**options)
    reply = live.openai().images.generate(**options)
    assert len(live.runner.batches) == 1
    assert Image.open(io.BytesIO(base64.b64decode(reply.data[0].b64_json))).size == (6, 4)


def test_who_comes_with_the_key_of_a_request_that_is_refused_is_refused_too(durable, monkeypatch):
    live, other = durable(), durable()
    key = {"idempotency-key": "k"}
    entered, attached, refuse = threading.Event(), threading.Semaphore(0), threading.Event()

    def full(*args, **kwargs):
        entered.set()
        refuse.wait(20)
        raise QueueFull("as many wait as may", retry_after=7)

    def tell(service):
        attach = service.attach

        def telling(record):
            job = attach(record)
            attached.release()
            return job

        monkeypatch.setattr(service, "attach", telling)

    tell(live.service)
    tell(other.service)
    with monkeypatch.context() as patched, ThreadPoolExecutor(3) as pool:
        patched.setattr(live.service.scheduler, "submit", full)
        first = pool.submit(post, live, headers=key)
        assert entered.wait(10)
        second = pool.submit(post, live, headers=key)
        elsewhere = pool.submit(post, other, headers=key)
        for _ in range(2):
            assert attached.acquire(timeout=10)
        refuse.set()
        for reply in (first.result(), second.result()):
            assert live.refusal(reply, 429)["code"] == "queue_full"
            assert reply.headers["retry-after"] == "7"
        assert other.refusal(elsewhere.result(), 503)["code"] == "unavailable"
    assert post(live, headers=key).status_code == 200


def test_a_job_whose_result_the_locked_database_refused_is_made_again(durable, monkeypatch):
    live = durable()
    key = {"idempotency-key": "k"}
    whole = live.storage.files.database

    class Locked:
        def write(self):
            monkeypatch.setattr(live.storage.files, "database", whole)
            raise StoreUnavailable("database is locked")

    monkeypatch.setattr(live.storage.files, "database", Locked())
    assert live.refusal(post(live, headers=key), 503)["code"] == "unavailable"
    reply = post(live, headers=key)
    assert reply.status_code == 200, reply.text
    record = until_final(live, reply.json()["id"])
    assert (record["status"], record["error"], record["attempts"]) == ("completed", None, 2)
    assert len(live.runner.batches) == 2


def test_plain_requests_are_served_while_the_database_is_locked(durable, tmp_path, monkeypatch):
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.3)
    live = durable()
    other = sqlite3.connect(tmp_path / "state" / "jobs.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: live.generate(), range(12)))
        assert {reply.status_code for reply in replies} == {200}
        refused = list(pool.map(lambda n: post(live, seed=n), range(12)))
        assert {reply.status_code for reply in refused} == {503}
    assert time.monotonic() - began < 3  # each writer's own wait were 14 seconds
    other.rollback()
    other.close()
    deadline = time.monotonic() + 10
    while post(live).status_code != 202:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    job_id = replies[0].json()["id"]
    assert live.http.get(f"/v1/jobs/{job_id}").json()["status"] == "completed"


def test_a_key_ends_with_the_pictures_that_it_stands_for(durable, tmp_path):
    live = durable(file_ttl=1.0, job_ttl=600.0)
    key = {"idempotency-key": "k"}
    body = {"seed": None, "response_format": "url"}
    first = post(live, headers=key, **body).json()
    assert live.http.get(first["data"][0]["url"]).status_code == 200
    time.sleep(1.1)  # expired, swept or not
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda _: post(live, headers=key, **body), range(4)))
    assert {reply.status_code for reply in replies} == {200}
    (second,) = {reply.json()["id"] for reply in replies}  # made again, once
    assert second != first["id"]
    assert live.http.get(replies[0].json()["data"][0]["url"]).status_code == 200
    assert len(live.runner.batches) == 2
    assert live.http.get(f"/v1/jobs/{first['id']}").json()["status"] == "completed"
    time.sleep(1.1)
    assert post(live, headers=key, seed=4).status_code == 200  # no key, no other request


def test_a_link_is_never_to_a_picture_that_is_gone(durable, monkeypatch):
    live = durable()
    key = {"idempotency-key": "k"}
    attach = live.service.attach

    def lose(record):
        live.storage.files.delete(record.results[0]["file_id"])  # after the key was looked up
        return attach(record)

    for form in ("url", "b64_json"):
        monkeypatch.undo()
        assert post(live, headers=key, response_format=form).status_code == 200
        monkeypatch.setattr(live.service, "attach", lose)
        message = live.refusal(post(live, headers=key, response_format=form), 404)["message"]
        assert "not stored any more" in message
        key = {"idempotency-key": "k2"}


# Edits.


def test_inputs_wait_for_a_server_that_was_killed(durable, editor, tmp_path):
    """The upload is gone with the first server; its copy in the file store is not."""
    held = threading.Event()

    class Held(Looking):
        def run(self, batch):
            held.wait(20)
            return super().run(batch)

    live = durable(Held(), editor)
    body = {"data": {"prompt": "at night"} | FIELDS, "files": {"image": picture(color=(9, 8, 7))}}
    response = live.http.post("/v1/images/edits", headers=ASYNC, **body)
    assert response.status_code == 202, response.text
    job_id = response.json()["id"]
    assert [p.suffix for p in stored(tmp_path)] == [".input"]
    live.context.lifecycle._keeper.close()  # as if killed: it would claim its job again at once
    with sqlite3.connect(tmp_path / "state" / "jobs.sqlite3") as connection:
        connection.execute("UPDATE jobs SET owner = 'killed', lease_until = 1")
    connection.close()
    other = durable(Looking(), editor)
    record = until_final(other, job_id)
    assert record["status"] == "completed", record
    assert record["attempts"] == 2
    ((seen,),) = other.runner.seen
    assert seen.getpixel((0, 0)) == (9, 8, 7)
    held.set()
    time.sleep(0.3)
    assert until_final(live, job_id) == record  # the one that lost it wrote nothing
    assert sorted(p.suffix for p in stored(tmp_path)) == [".png"]  # CB-075


def test_a_key_is_of_the_pictures_too(durable, editor):
    live = durable(Looking(), editor)

    def edit(color, name):
        files = {"image": (name, picture(color=color))}
        return live.http.post("/v1/images/edits", data={"prompt": "x"} | FIELDS, files=files,
                              headers={"idempotency-key": "k"})  # fmt: skip

    first = edit((1, 2, 3), "a.png")
    assert edit((1, 2, 3), "b.png").json()["id"] == first.json()["id"]
    live.refusal(edit((1, 2, 4), "a.png"), 422)


# Cancel, leases, deadlines.


def test_a_server_that_lost_a_job_stops_it_and_writes_nothing(durable, tmp_path):
    live = durable(SlowRunner(step_seconds=0.05))
    job_id = post(live, num_inference_steps=200).json()["id"]
    live.runner.began.wait(10)
    live.storage.records.update(job_id, owner="other", lease_until=time.time() + 100)
    deadline = time.monotonic() + 10
    while job_id in live.service.live:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert live.runner.steps < 200
    record = live.storage.records.get(job_id)
    assert record.owner == "other"
    assert not record.final


def test_a_deadline_goes_on_while_no_server_is_there(durable, tmp_path):
    live = durable(SlowRunner(step_seconds=0.05))
    job_id = post(live, num_inference_steps=200, timeout=600).json()["id"]
    live.runner.began.wait(10)
    record = live.storage.records.get(job_id)
    assert 590 < record.deadline - time.time() <= 600
    changes = {"owner": None, "lease_until": None, "deadline": time.time() - 1}
    live.storage.records.update(job_id, **changes)
    record = until_final(live, job_id)
    assert (record["status"], record["error"]["code"]) == ("failed", "deadline_exceeded")


def test_any_server_ends_what_nobody_has_of_another_model(durable):
    """No server of that model may ever come: cancels and deadlines hold all the same."""
    live = durable()
    post(live)
    ids = ("cancelled", "late", "waits", "held")
    (known,) = live.storage.records.list()
    for job_id in ids:
        held = job_id == "held"
        live.storage.records.add(
            dataclasses.replace(
                known, id=job_id, model="another", status="in_progress", completed_at=None,
                expires_at=None, results=(), cancel_requested=held, owner="gone",
                lease_until=time.time() + (100 if held else -1),
                deadline=time.time() - 1 if job_id == "late" else None,
            )
        )  # fmt: skip
    live.http.post("/v1/jobs/cancelled/cancel")
    assert until_final(live, "cancelled")["status"] == "cancelled"
    record = until_final(live, "late")
    assert (record["status"], record["error"]["code"]) == ("failed", "deadline_exceeded")
    assert record["expires_at"] is not None
    JobKeeper(live.service).tick()
    waiting, held = (live.storage.records.get(job_id) for job_id in ("waits", "held"))
    assert (waiting.status, waiting.model) == ("queued", "another")
    assert (held.status, held.owner) == ("in_progress", "gone")  # its own server will


def test_finished_parts_are_not_made_again(durable):
    """A job of several batches that is taken over goes on after those whose outputs are kept."""
    runner = SlowRunner(step_seconds=0.6)
    live = durable(runner)
    job_id = post(live, n=10).json()["id"]  # batches of 4, 4 and 2
    while len(live.storage.records.get(job_id).results) < 4:
        time.sleep(0.02)
    live.context.lifecycle._keeper.close()  # as if killed: it would claim its job again at once
    live.storage.records.update(job_id, owner="killed", lease_until=1.0)
    other = durable()
    record = until_final(other, job_id)
    assert [result["seed"] for result in record["results"]] == list(range(3, 13))
    made = [seed for batch in other.runner.batches for seed in batch.seeds]
    assert made == list(range(3 + 10 - len(made), 13))
    assert len(made) in (6, 2)


def test_no_work_is_claimed_by_a_server_that_stops(durable):
    live = durable()
    job_id = post(live).json()["id"]
    until_final(live, job_id)
    live.context.lifecycle.stop_taking()
    done = live.storage.records.get(job_id)
    live.storage.records.add(dataclasses.replace(done, id="x", status="queued", owner=None))
    JobKeeper(live.context.lifecycle.opened).tick()
    assert live.storage.records.get("x").owner is None


# Expiry.


def test_record_and_files_go_together(durable, tmp_path):
    """CB-031"""
    live = durable(file_ttl=1.0, job_ttl=1.0)
    record = until_final(live, post(live).json()["id"])
    assert record["expires_at"] - record["completed_at"] == 1
    assert len(stored(tmp_path)) == 1
    time.sleep(1.1)
    sweep(live.context)
    assert stored(tmp_path) == []
    assert live.http.get(f"/v1/jobs/{record['id']}").status_code == 404
    assert live.http.get(f"/v1/jobs/{record['id']}/content").status_code == 404


def test_what_nobody_knows_of_is_removed_at_the_start(durable, tmp_path):
    live = durable()
    record = until_final(live, post(live).json()["id"])
    (kept,) = stored(tmp_path)
    orphan = kept.with_name("0" * 32 + ".png")
    orphan.write_bytes(b"left over")
    foreign = tmp_path / "state" / "files" / "mine.txt"
    foreign.write_text("a user's own")
    state = kept.parents[1] / "states" / f"{'0' * 32}-0.safetensors"
    state.write_bytes(b"left over")
    live.storage.clean_up()
    assert sorted(stored(tmp_path)) == sorted([kept, foreign])
    assert live.http.get(f"/v1/jobs/{record['id']}/content").status_code == 200


# Webhooks.


def test_a_webhook_is_told_of_the_end(durable, monkeypatch):
    receiver = Receiver()
    thread = threading.Thread(target=receiver.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        live = durable(webhook_secret=SECRET, webhook_allow_private=True)
        job_id = post(live, webhook_url=receiver.url).json()["id"]
        deadline = time.monotonic() + 10
        while not receiver.seen:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        ((headers, body),) = receiver.seen
        client = openai.OpenAI(api_key="x", webhook_secret=SECRET)
        client.webhooks.verify_signature(body, headers)
        assert job_id in body
        strict = durable(webhook_secret=SECRET)
        error = strict.refusal(post(strict, webhook_url=receiver.url))
        assert error["param"] == "webhook_url"
        none = durable()
        assert none.refusal(post(none, webhook_url=receiver.url))["code"] == "no_webhooks"
    finally:
        receiver.shutdown()
        thread.join(10)
        receiver.server_close()


def test_a_sweep_that_fails_is_not_the_last(durable, monkeypatch, caplog):
    live = durable()
    sweeps = []

    def fail(now):
        sweeps.append(now)
        raise ValueError("a bug")

    monkeypatch.setattr(live.service, "sweep", fail)
    deadline = time.monotonic() + 10
    while len(sweeps) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "a sweep failed" in caplog.text
