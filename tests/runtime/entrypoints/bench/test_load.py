"""Load on live servers whose runner needs no model, and on ones that do wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter

import pytest

from runtime.entrypoints.http.conftest import SlowRunner
from runtime.entrypoints.http.conftest import description as description
from runtime.entrypoints.http.conftest import editor as editor
from runtime.entrypoints.http.conftest import start as start
from runtime.entrypoints.http.video_server import describe, serving_clips, write_model
from sglang.multimodal_gen.runtime.entrypoints.bench.load import connected, made_alone, run_load
from sglang.multimodal_gen.runtime.entrypoints.bench.mix import MixEntry, mix_for, plan
from sglang.multimodal_gen.runtime.entrypoints.bench.report import failed, summary, table_of
from sglang.multimodal_gen.runtime.managers.worker import Worker
from sglang.multimodal_gen.runtime.utils.errors import InternalError, UserError

SMALL = {"prompt": "a fox", "size": "64x48", "num_inference_steps": 2, "max_sequence_length": 16}
MIX = (
    MixEntry("plain", SMALL),
    MixEntry("two", SMALL | {"n": 2}),
    MixEntry("stream", SMALL | {"stream": True, "partial_images": 1}),
)


def loaded(live, mix, *, rate=50.0, count=30, check=True, timeout=20.0, between=lambda: None):
    async def run():
        async with connected(live.url, None) as http:
            alone = await made_alone(http, mix, 2, timeout) if check else {}
            between()
            arrivals = plan(mix, rate=rate, count=count, seed=1, variants=2)
            return await run_load(http, arrivals, alone, timeout)

    return summary(asyncio.run(run()), rate)


def test_good_answers_are_counted_and_compared(start):
    live = start(SlowRunner(step_seconds=0.005))
    found = loaded(live, MIX)
    assert (found["ok"], found["lost"], found["error"]) == (30, 0, 0)
    assert (found["compared"], found["wrong"], found["largest_distance"]) == (30, 0, 0)
    assert found["latency"]["p50"] <= found["latency"]["p90"] <= found["latency"]["p99"]
    assert found["queue"]["p50"] >= 0
    assert found["first_preview"] is not None
    assert found["images_per_second"] > found["requests_per_second"]
    assert not failed([found])
    assert set(found["by_entry"]) == {"plain", "two", "stream"}
    assert len(table_of([found, found]).columns) == 3


def test_a_wrong_picture_is_found(start):
    """The proof that "none wrong" says something: a neighbour's picture in place of one's own."""
    live = start()

    def exchange():
        run = type(live.runner).run

        def wrong(batch):
            output = run(live.runner, batch)
            return dataclasses.replace(output, output=output.output + 3 / 255)

        live.runner.run = wrong

    found = loaded(live, MIX, between=exchange)
    assert found["wrong"] == found["compared"] == 30
    assert failed([found])


def test_small_differences_are_none(start):
    live = start()

    def exchange():
        run = type(live.runner).run

        def nearly(batch):
            output = run(live.runner, batch)
            return dataclasses.replace(output, output=output.output + 2 / 255)

        live.runner.run = nearly

    found = loaded(live, MIX, between=exchange)
    assert (found["wrong"], found["largest_distance"]) == (0, 2)


def test_an_overload_is_rejected_and_the_queue_stays_bounded(start):
    live = start(SlowRunner(step_seconds=0.05), max_queued_requests=3)
    found = loaded(live, MIX[:1], rate=200, count=40)
    assert found["rejected"] > 10
    assert found["ok"] + found["rejected"] == 40
    assert 1 <= found["max_waiting"] <= 3
    assert not failed([found])  # a full queue that says so is no failure


def test_errors_are_told_by_code_and_fail_the_test(start):
    live = start()

    def exchange():
        live.runner.fail = lambda batch: InternalError("secret")

    found = loaded(live, MIX, count=9, between=exchange)
    assert found["errors_by_code"] == {"internal_error": 9}
    statuses = Counter(outcome["status"] for outcome in found["outcomes"])
    assert statuses[500] > 0
    assert failed([found])


def test_no_answer_is_lost(start):
    live = start(SlowRunner(step_seconds=1.0))
    found = loaded(live, MIX[:1], count=3, check=False, timeout=0.3)
    assert found["lost"] == 3
    assert failed([found])


def test_a_server_that_dies_loses_what_it_had(start):
    live = start(SlowRunner(step_seconds=0.05))

    async def run():
        async with connected("http://127.0.0.1:9", None) as http:
            arrivals = plan(MIX, rate=100, count=4, seed=1, variants=1)
            return await run_load(http, arrivals, {}, 5.0)

    found = summary(asyncio.run(run()), 100)
    assert found["lost"] == 4
    assert found["max_waiting"] is None
    assert live.generate().status_code == 200


@pytest.mark.parametrize("by", ["hang_up", "route"])
def test_clients_change_their_minds(start, by):
    live = start(SlowRunner(step_seconds=0.02))
    body = SMALL | {"num_inference_steps": 400, "stream": by == "route"}
    mix = (MixEntry("gone", body, 1, 0.1, by),)
    found = loaded(live, mix, count=5)
    assert found["cancelled"] == 5
    assert not failed([found])
    deadline = time.perf_counter() + 5
    while live.service.scheduler.status.running and time.perf_counter() < deadline:
        time.sleep(0.02)
    assert not live.service.scheduler.status.running


def test_the_loop_is_open(start):
    """Requests come when they should, though the first still runs."""
    live = start(SlowRunner(step_seconds=0.3))
    found = loaded(live, MIX[:1], rate=40, count=20, check=False)
    assert found["sent_late"]["max"] < 0.25
    assert found["latency"]["p99"] > 0.5


def test_a_mix_that_the_server_refuses_ends_with_its_words(start):
    live = start()
    with pytest.raises(UserError, match=r"'odd' of the mix.*multiple"):
        loaded(live, (MixEntry("odd", SMALL | {"size": "65x48"}),))


def test_edits_are_asked_for_and_compared(start, editor):
    live = start(model=editor)
    usual = mix_for(live.http.get("/v1/models").json()["data"][0]["tasks"])
    (edit,) = [entry for entry in usual if entry.asks == "edit"]
    mix = (dataclasses.replace(edit, body=edit.body | {"max_sequence_length": 16}),)
    found = loaded(live, mix, count=6)
    assert (found["ok"], found["compared"], found["wrong"]) == (6, 6, 0)
    assert all(batch.image_path for batch in live.runner.batches)


def test_videos_are_waited_for_and_fetched(tmp_path):
    model = describe(write_model(tmp_path))
    with serving_clips(model, Worker(model)) as live:
        mix = mix_for(live.http.get("/v1/models").json()["data"][0]["tasks"])
        assert {entry.name for entry in mix} >= {"video", "video cancelled"}
        found = loaded(live, [entry for entry in mix if entry.name == "video"], count=4)
        assert (found["ok"], found["lost"], found["error"]) == (4, 0, 0)
        assert [outcome["images"] for outcome in found["outcomes"]] == [1] * 4
        assert len(live.http.get("/v1/videos").json()["data"]) == 4
        live.runner.step_seconds = 0.1
        found = loaded(live, [entry for entry in mix if entry.name == "video cancelled"], count=1)
        assert found["cancelled"] == 1
        live.runner.step_seconds = 0.0
        wrong = (MixEntry("bad", {"prompt": "x", "num_frames": 0}, asks="video"),)
        found = loaded(live, wrong, count=1)
        assert found["errors_by_code"] == {"invalid_value": 1}
