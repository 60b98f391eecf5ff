"""CB-082: numbers that add up; a line a request; traces."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import re
import sys
import threading
import time
from functools import partial

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from runtime.entrypoints.http.conftest import SlowRunner
from sglang.multimodal_gen.runtime.entrypoints.http import request_log
from sglang.multimodal_gen.runtime.entrypoints.http.tracing import Tracing, open_tracing
from sglang.multimodal_gen.runtime.utils.errors import InternalError, InvalidArgument


def numbers(live) -> dict[str, float]:
    """Samples by name and labels, as a scraper reads them."""
    text = live.http.get("/metrics").text
    return {
        sample.name + "".join(f",{k}={v}" for k, v in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def wait_for(condition) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_queue_as_it_is(start):
    live = start(SlowRunner(step_seconds=0.2), max_queued_requests=9)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        first = pool.submit(live.generate, seed=1, num_inference_steps=8)
        assert live.runner.began.wait(10)
        others = [pool.submit(live.generate, seed=2, guidance_scale=k / 10) for k in range(1, 10)]
        wait_for(lambda: live.service.scheduler.status.waiting == 9)
        assert live.generate().status_code == 429
        seen = numbers(live)
        assert (seen["sglang_queue_running"], seen["sglang_queue_waiting"]) == (1, 9)
        assert seen["sglang_queue_capacity"] == 9
        assert [f.result().status_code for f in (first, *others)] == [200] * 10
    seen = numbers(live)
    assert (seen["sglang_queue_running"], seen["sglang_queue_waiting"]) == (0, 0)
    assert seen["sglang_jobs_total,kind=image_generation,status=completed"] == 10
    assert seen["sglang_rejected_total,reason=queue_full"] == 1
    assert seen["sglang_queue_seconds_count"] == 10
    assert seen["sglang_queue_seconds_sum"] > 0.5


def test_counts_add_up(start):
    live = start()
    live.generate(n=3)
    live.generate(n=0)
    live.runner.fail = lambda batch: InternalError("secret at /work/x")
    live.generate()
    live.http.get("/v1/jobs/" + "x" * 300)
    live.http.get("/wp-admin/" + "y" * 30)
    seen = numbers(live)
    route = ",method=POST,route=/v1/images/generations"
    assert seen[f"sglang_http_requests_total,code=200{route}"] == 1
    assert seen[f"sglang_http_requests_total,code=400{route}"] == 1
    assert seen[f"sglang_http_requests_total,code=500{route}"] == 1
    assert seen["sglang_http_requests_total,code=404,method=GET,route=/v1/jobs/{job_id}"] == 1
    assert seen["sglang_http_requests_total,code=404,method=GET,route=(none)"] == 1
    assert seen["sglang_errors_total,code=invalid_value"] == 1
    assert seen["sglang_errors_total,code=internal_error"] == 1
    assert seen["sglang_jobs_total,kind=image_generation,status=failed"] == 1
    assert seen["sglang_job_errors_total,code=internal_error"] == 1
    assert seen["sglang_outputs_total"] == 3
    assert seen["sglang_batches_total,outcome=completed"] == 1
    assert seen["sglang_batches_total,outcome=failed"] == 1
    assert seen["sglang_batch_size_sum"] == 4
    assert seen["sglang_denoising_steps_total"] == 2
    assert seen["sglang_stage_seconds_sum,stage=denoising_stage"] == 0.5
    assert seen["sglang_batch_peak_memory_mebibytes"] == 1
    assert seen["process_resident_memory_bytes"] > 2**24
    assert seen["sglang_ready"] == 1
    assert "y" * 30 not in str(seen)


def test_two_servers_do_not_share_numbers(start):
    one, other = start(), start()
    one.generate()
    assert numbers(one)["sglang_outputs_total"] == 1
    assert numbers(other)["sglang_outputs_total"] == 0


# The log.


@pytest.fixture
def lines(caplog):
    logger = logging.getLogger("sglang.requests")
    before = logger.propagate, logger.level
    logger.propagate, logger.level = True, logging.INFO
    caplog.set_level(logging.INFO, "sglang.requests")
    yield lambda: [r.line for r in caplog.records if r.name == "sglang.requests"]
    logger.propagate, logger.level = before


def test_one_line_a_request_with_its_job(start, lines):
    live = start()
    reply = live.generate(n=2, prompt="my secret")
    wait_for(lambda: len(lines()) == 1)  # the line comes after the last byte
    line = lines()[-1]
    assert line["request_id"] == reply.headers["x-request-id"]
    assert line["job"] == reply.json()["id"]
    assert (line["method"], line["route"]) == ("POST", "/v1/images/generations")
    assert (line["status"], line["steps"], line["outputs"]) == (200, 2, 2)
    assert line["seconds"] >= line["run_seconds"] >= 0
    assert line["queue_seconds"] >= 0
    live.generate(n=0)
    wait_for(lambda: len(lines()) == 2)
    assert (lines()[-1]["status"], lines()[-1]["error"]) == (400, "invalid_value")
    live.http.get("/health?x=secret")
    wait_for(lambda: len(lines()) == 3)
    assert "secret" not in str(lines())


def test_a_sane_id_is_kept_and_another_replaced(shared):
    for asked in ("abc-1.2:3_x", "a" * 128):
        reply = shared.http.get("/liveness", headers={"x-request-id": asked})
        assert reply.headers["x-request-id"] == asked
    for asked in ("", "a" * 129, "a b", "a=b", "{}", "-x", "a;b", "a\tb"):
        reply = shared.http.get("/liveness", headers={"x-request-id": asked})
        assert re.fullmatch("[0-9a-f]{32}", reply.headers["x-request-id"]), asked


def test_lines_as_text_as_json_and_none(start, capfd):
    logger = logging.getLogger("sglang.requests")
    before = logger.propagate, logger.level, list(logger.handlers)
    live = start()
    try:
        for form in ("text", "json", "off"):
            request_log.start_request_log(form)
            capfd.readouterr()
            live.generate()
            time.sleep(0.2)
            err = capfd.readouterr().err
            if form == "off":
                assert "v1/images" not in err
                continue
            (line,) = [text for text in err.splitlines() if "v1/images" in text]
            if form == "json":
                assert json.loads(line)["status"] == 200
            else:
                assert " status=200 " in line
    finally:
        logger.propagate, logger.level = before[:2]
        logger.handlers[:] = before[2]


def test_a_reader_that_stalls_stops_nobody_and_lost_lines_are_counted():
    """A full pipe on standard error once froze the event loop, and the whole server with it."""
    stalled, written = threading.Event(), []

    class Pipe(logging.Handler):
        def emit(self, record):
            assert stalled.wait(20)
            written.append(record.line)

    log = logging.Logger("stalls")
    handler = request_log.Unhurried(Pipe(), waiting=2)
    log.addHandler(handler)
    begin = time.monotonic()
    for number in range(50):
        log.info("", extra={"line": {"number": number}})
    assert time.monotonic() - begin < 5
    assert not handler.drain(0.01)
    stalled.set()
    assert handler.drain(20)
    log.info("", extra={"line": {"number": 50}})
    log.info("", extra={"line": {"number": 51}})
    assert handler.drain(20)
    kept = [line["number"] for line in written]
    assert kept[:2] == [0, 1]
    assert kept[-2:] == [50, 51]
    assert written[-2]["dropped"] == 52 - len(kept) > 40
    assert "dropped" not in written[-1]


# Traces.


@pytest.fixture
def traced(start):
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))
    yield partial(start, tracing=tracing), exporter
    tracing.close()


def test_a_request_its_wait_its_batch_and_its_stages(traced):
    start, exporter = traced
    live = start()
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    reply = live.http.post(
        "/v1/images/generations",
        json={"prompt": "a fox", "num_inference_steps": 2, "size": "64x48"},
        headers={"traceparent": parent},
    )
    assert reply.status_code == 200
    wait_for(lambda: len(exporter.get_finished_spans()) >= 4)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    request = spans["POST /v1/images/generations"]
    assert f"{request.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{request.parent.span_id:016x}" == "b7ad6b7169203331"
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["http.request.id"] == reply.headers["x-request-id"]
    assert request.attributes["sglang.job.id"] == reply.json()["id"]
    for name, parent_name in (
        ("queue", "POST /v1/images/generations"),
        ("batch", "POST /v1/images/generations"),
        ("denoising_stage", "batch"),
    ):
        assert spans[name].parent.span_id == spans[parent_name].context.span_id, name
    assert spans["queue"].end_time == spans["batch"].start_time
    assert spans["batch"].attributes["sglang.steps"] == 2
    stage = spans["denoising_stage"]
    assert stage.end_time - stage.start_time == pytest.approx(0.5e9, rel=0.01)
    assert live.context.tracing._requests == {}


def test_a_shared_batch_is_linked_to_each_request(traced):
    start, exporter = traced
    live = start(batching_delay_ms=2000)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: live.generate(seed=seed), range(4)))
    wait_for(lambda: sum(s.name.startswith("POST") for s in exporter.get_finished_spans()) == 4)
    spans = exporter.get_finished_spans()
    (batch,) = [span for span in spans if span.name == "batch"]
    assert batch.attributes["sglang.batch.jobs"] == 4
    assert len(batch.links) == 3
    assert sum(span.name == "queue" for span in spans) == 4
    requests = {span.context.span_id for span in spans if span.name.startswith("POST")}
    assert {batch.parent.span_id, *(link.context.span_id for link in batch.links)} == requests


def test_without_the_libraries_the_extra_is_named(monkeypatch):
    assert open_tracing(None) is None
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(InvalidArgument, match=r"pip install 'sglang-diffusion\[otel\]'"):
        open_tracing("http://127.0.0.1:1/v1/traces")
