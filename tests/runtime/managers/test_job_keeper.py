"""The hold on jobs: what cannot be taken up now is not forgotten, and no record stops the beat."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.managers.stubs import StubRunner
from sglang.multimodal_gen.configs.task_type import DataType
from sglang.multimodal_gen.runtime.entrypoints.http.opening import service_of
from sglang.multimodal_gen.runtime.managers import job_keeper
from sglang.multimodal_gen.runtime.managers.job_keeper import JobKeeper
from sglang.multimodal_gen.runtime.managers.jobs import IdempotencyKey, JobRecord
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.managers.observer import Observer
from sglang.multimodal_gen.runtime.managers.service import GenerationService
from sglang.multimodal_gen.runtime.managers.storage.opening import Storage, open_storage
from sglang.multimodal_gen.runtime.managers.work_order import WorkOrder
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.serving import ServingArgs
from sglang.multimodal_gen.runtime.utils.errors import OutputError, StoreUnavailable

SETTINGS = {"prompt": "a fox", "width": 64, "height": 48, "seed": [3], "num_inference_steps": 2,
            "max_sequence_length": 16}  # fmt: skip


class Bench:
    """A service without doors, whose threads are the test's own."""

    def __init__(self, service: GenerationService, storage: Storage) -> None:
        self.service = service
        self.storage = storage
        self.keeper = JobKeeper(service)

    def add(self, job_id: str, **changes) -> None:
        """A durable job that no server has."""
        rerun = {"settings": SETTINGS, "data_type": "IMAGE", "keep": "png", "keep_quality": None,
                 "warnings": []}  # fmt: skip
        values = {"kind": "k", "model": self.service.served_name, "created_at": time.time(),
                  "rerun": rerun}  # fmt: skip
        self.storage.records.add(JobRecord(id=job_id, **values | changes))

    def record(self, job_id: str) -> JobRecord:
        found = self.service.jobs.get(job_id)
        assert found is not None
        return found

    def work(self) -> None:
        while self.service.scheduler.run_next():
            pass
        self.service.keeping.close(10)


@pytest.fixture(scope="module")
def description(folder) -> ModelDescription:
    args = ServerArgs.from_flat(model_path=str(folder), device="cpu", precision="fp32")
    return ModelDescription.find(args)


@pytest.fixture
def bench(description, tmp_path) -> Iterator[Callable[..., Bench]]:
    """Makes services on one job store."""
    with contextlib.ExitStack() as stack:

        def make(**flags) -> Bench:
            state = str(tmp_path / "state")
            serving = ServingArgs.from_flat(port=0, state_dir=state, **flags)
            storage = stack.enter_context(open_storage(serving))
            return Bench(service_of(description, StubRunner(), serving, storage), storage)

        yield make


@pytest.fixture
def one(bench) -> Bench:
    return bench()


def test_a_record_that_makes_no_sense_fails_alone(one):
    """A record of another version, or a bug: the beat goes on, and with it all leases."""
    one.add("bad", rerun={"settings": {"seed": [1]}}, created_at=1.0)
    one.add("good")
    one.keeper.start()
    one.keeper.close()
    one.work()
    assert one.record("bad").status == "failed"
    assert one.record("bad").error["code"] == "internal_error"
    assert one.record("good").status == "completed"


def test_a_job_that_was_claimed_and_not_taken_up_is_taken_up_later(one, monkeypatch):
    one.add("first")
    one.add("second")
    update, failures = one.service.jobs.inner.update, [1]

    def once(job_id, **changes):
        if "attempts" in changes and failures:
            failures.pop()
            raise StoreUnavailable("the database is locked")
        return update(job_id, **changes)

    monkeypatch.setattr(one.service.jobs.inner, "update", once)
    with pytest.raises(StoreUnavailable):
        one.keeper.tick()
    assert one.record("first").owner == one.service.owner  # claimed, and nothing runs it
    assert not one.service.live
    for _ in range(4):
        one.keeper.tick()
    one.work()
    assert {one.record(name).status for name in ("first", "second")} == {"completed"}


def test_a_stray_job_is_not_run_again_while_its_end_is_being_written(one):
    """It is over here, and the store has not heard of it yet."""
    one.add("done", owner=one.service.owner, lease_until=time.time() + 100)
    for _ in range(4):
        one.service.jobs.update_later("done", status="completed", completed_at=time.time())
        one.keeper._strays(
            [r.id for r in one.service.jobs.renew(one.service.owner, time.time() + 100)]
        )
    assert one.storage.records.get("done").owner == one.service.owner
    assert one.record("done").status == "completed"


def _with_input(one: Bench) -> str:
    file = one.service.files.put(b"x", "application/octet-stream", ".input", time.time() + 100)
    one.add("job", inputs={"image_path": [file.id]})
    return file.id


def test_inputs_that_cannot_be_read_now_are_read_later(one, monkeypatch):
    _with_input(one)
    read, failures = one.service.files.read, [1, 2]

    def sometimes(file_id):
        if failures:
            failures.pop()
            raise OutputError("the object store does not answer")
        return read(file_id)

    monkeypatch.setattr(one.service.files, "read", sometimes)
    for _ in range(8):
        one.keeper.tick()
    assert not failures
    # The tiny model takes no pictures: that is found out only once the input is there.
    assert "image" in one.record("job").error["message"]


def test_inputs_that_stay_unreadable_end_the_job_with_a_clear_error(one, monkeypatch):
    _with_input(one)
    monkeypatch.setattr(job_keeper, "MOST_TRIES", 2)

    def never(file_id):
        raise OutputError("the object store does not answer")

    monkeypatch.setattr(one.service.files, "read", never)
    for _ in range(8):
        one.keeper.tick()
    record = one.record("job")
    assert (record.status, record.error["code"]) == ("failed", "input_lost")
    assert "/" not in record.error["message"]


def test_an_input_that_is_gone_ends_the_job_at_once(one):
    one.service.files.delete(_with_input(one))
    one.keeper.tick()
    assert (one.record("job").status, one.record("job").error["code"]) == ("failed", "input_lost")


def test_leases_are_renewed_while_much_is_taken_up(one, monkeypatch):
    """A slow store of inputs must not cost the jobs that run already."""
    monkeypatch.setattr(one.keeper, "beat_seconds", 0.05)
    for number in range(8):
        one.add(f"job{number}")
    resume = one.service.resume

    def slowly(record):
        time.sleep(0.06)
        resume(record)

    monkeypatch.setattr(one.service, "resume", slowly)
    one.keeper.tick()
    assert 1 <= len(one.service.live) <= 2  # and the next beat goes on
    claimed = [r for r in one.storage.records.list() if r.owner == one.service.owner]
    assert len(claimed) == len(one.service.live)
    while len(one.service.live) < 8:
        one.keeper.tick()


def test_a_job_that_another_server_deletes_is_stopped(bench):
    """CB-068: DELETE stops the work wherever it is."""
    one, other = bench(), bench()
    one.add("gone")
    one.keeper.tick()
    assert set(one.service.live) == {"gone"}
    assert other.service.delete("gone")
    one.keeper.tick()
    assert not one.service.live
    assert one.service.scheduler.idle


def test_a_wait_after_a_restart_is_not_the_downtime(one):
    one.add("old", created_at=time.time() - 5000)
    one.keeper.tick()
    result = one.service.live["old"].result
    one.work()
    assert one.record("old").status == "completed"
    assert result.result(10).queue_seconds < 100
    assert one.record("old").created_at < time.time() - 4000


def test_inputs_go_with_a_job_that_the_store_refuses(one, tmp_path, monkeypatch):
    """At once where that can be, else as soon as the store answers again."""
    source = tmp_path / "input.png"
    source.write_bytes(b"pixels")
    order = WorkOrder(
        kind="k", settings=SETTINGS | {"image_path": [str(source)], "seed": 3},
        data_type=DataType.IMAGE, keep="png", durable=True,
    )  # fmt: skip
    monkeypatch.setattr(one.service, "admitted", lambda order: _admitted(one, order))

    def down(*args, **kwargs):
        raise StoreUnavailable("the database is locked")

    with monkeypatch.context() as patched:
        patched.setattr(one.service.jobs.inner, "add", down)
        patched.setattr(one.service.jobs.inner, "delete", down)
        patched.setattr(one.service.files, "delete", down)
        with pytest.raises(StoreUnavailable):
            one.service.submit(order)
        assert len(_inputs(tmp_path)) == 1
    one.service.sweep(time.time())
    assert _inputs(tmp_path) == []


def _admitted(one: Bench, order: WorkOrder):
    plain = {k: v for k, v in order.settings.items() if k != "image_path"}
    return one.service.model.admit(
        one.service.model.sampling_params(plain), data_type=order.data_type
    )


def _inputs(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "state").rglob("*.input"))


def test_who_waits_for_another_servers_job_shares_one_look_at_it(bench):
    one, other = bench(), bench()
    one.add("far", owner="elsewhere", lease_until=time.time() + 100)
    record = other.record("far")
    results = {id(other.service.attach(record).result) for _ in range(5)}
    assert len(results) == 1
    other.storage.records.update("far", status="cancelled", completed_at=time.time())
    with pytest.raises(Exception, match="cancelled"):
        other.service.attach(record).result.result(10)


def test_a_record_whose_add_was_half_heard_does_not_stop_the_flush(one, monkeypatch):
    """The database took it, and the answer was lost on the way."""
    add = one.service.jobs.inner.add

    def deaf(record, key=None):
        add(record, key)
        raise StoreUnavailable("the connection was closed")

    record = JobRecord(id="twice", kind="k", model="m", created_at=time.time())
    with monkeypatch.context() as patched:
        patched.setattr(one.service.jobs.inner, "add", deaf)
        one.service.jobs.add(record)
    one.service.jobs.update("twice", status="completed", completed_at=time.time())
    one.service.jobs.flush()
    assert one.storage.records.get("twice").status == "completed"
    one.keeper.tick()


def test_a_job_whose_outputs_were_all_kept_is_counted_when_it_ends(one):
    """It was interrupted between its last output and its end."""
    heard = []

    class Counting(Observer):
        def job(self, record, parts, result):
            result.add_done_callback(lambda result: heard.append(result.result().id))

    one.service.observe(Counting())
    file = one.service.files.put(b"x", "image/png", ".png", time.time() + 100)
    one.add("made", results=({"seed": 3, "file_id": file.id},))
    one.keeper.tick()
    one.work()
    assert (one.record("made").status, heard) == ("completed", ["made"])
    assert one.service.scheduler.runner.batches == []


def test_a_key_whose_job_comes_and_goes_is_tried_again_by_its_client(one, monkeypatch):
    """Refused for want of room each time, just between two looks."""
    store = one.storage.records
    monkeypatch.setattr(store, "find", lambda key, now: None)
    monkeypatch.setattr(store, "_add_with_key", lambda record, key: False)
    record = JobRecord(id="x", kind="k", model="m", created_at=time.time())
    with pytest.raises(StoreUnavailable):
        store.add(record, IdempotencyKey("k", "f"))
