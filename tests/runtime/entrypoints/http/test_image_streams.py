"""Streamed pictures, and clients that leave."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import socket
import threading
import time

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from runtime.entrypoints.http.conftest import SMALL, SlowRunner, running
from sglang.multimodal_gen.runtime.entrypoints.http.image_work import ImageWork
from sglang.multimodal_gen.runtime.entrypoints.http.opening import open_service
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.serving import ServingArgs
from sglang.multimodal_gen.runtime.utils.errors import InternalError

EXTRA = {"num_inference_steps": 8, "max_sequence_length": 16, "seed": 3}


@pytest.fixture(scope="module")
def real(folder):
    """The tiny checkpoint itself, loaded and warmed up."""
    args = ServerArgs.from_flat(model_path=str(folder), device="cpu", precision="fp32")
    # The family's default size would take the tiny model minutes: no warm-up.
    serving = ServingArgs.from_flat(port=0, served_model_name="tiny", warmup_mode="off")
    with running(
        lambda kept: open_service(args, serving, kept, lambda event: None), serving, None
    ) as live:
        while live.context.lifecycle.phase == "loading":
            time.sleep(0.01)
        yield live


def pixels(text: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text)))).astype(int)


def test_the_official_client_sees_real_previews_and_the_same_picture(real):
    client = real.openai()
    options = {"prompt": "a fox", "size": "48x32"}
    plain = client.images.generate(**options, extra_body=EXTRA)
    stream = client.images.generate(**options, stream=True, partial_images=3, extra_body=EXTRA)
    events = list(stream)
    assert [event.type for event in events] == (
        ["image_generation.partial_image"] * 3 + ["image_generation.completed"]
    )
    assert [event.partial_image_index for event in events[:-1]] == [0, 1, 2]
    assert {(e.size, e.output_format, e.background) for e in events} == {("48x32", "png", "opaque")}
    final = pixels(events[-1].b64_json)
    assert (final == pixels(plain.data[0].b64_json)).all()
    distances = [np.abs(pixels(event.b64_json) - final).mean() for event in events[:-1]]
    assert 0 < distances[-1] == min(distances) < distances[0]
    assert len({event.b64_json for event in events}) == 4
    assert events[-1].seed == 3


def test_several_pictures_stream_with_their_numbers(real):
    stream = real.openai().images.generate(
        prompt="a fox", size="32x32", n=2, stream=True, partial_images=1, extra_body=EXTRA
    )
    seen = [(event.type.rpartition(".")[2], event.image_index) for event in stream]
    assert seen == [("partial_image", 0), ("partial_image", 1), ("completed", 0), ("completed", 1)]


def test_an_error_in_mid_stream_reaches_the_client_as_one(start):
    live = start()
    live.runner.fail = lambda batch: InternalError("secret")
    with pytest.raises(openai.APIError) as caught:
        list(live.openai().images.generate(prompt="a fox", stream=True, size="64x48",
                                           extra_body={"max_sequence_length": 16}))  # fmt: skip
    assert "secret" not in str(caught.value)
    # What is wrong from the start is no stream.
    response = live.generate(stream=True, n=0)
    assert live.refusal(response)["param"] == "n"


def raw(live, body) -> socket.socket:
    """A client that can hang up."""
    data = json.dumps({"prompt": "a fox"} | SMALL | body).encode()
    host, port = live.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    client.sendall(
        b"POST /v1/images/generations HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(data) + data
    )
    return client


@pytest.mark.parametrize("stream", [False, True])
def test_work_stops_when_its_client_leaves(start, stream):
    """CB-069: within a step; and the next request begins at once."""
    live = start(SlowRunner(step_seconds=0.05))
    client = raw(live, {"num_inference_steps": 200, "stream": stream})
    live.runner.began.wait(5)
    client.close()
    start_time = time.perf_counter()
    assert live.generate().status_code == 200
    assert time.perf_counter() - start_time < 2
    assert live.runner.steps < 30


def test_a_waiting_request_whose_client_left_never_runs(start):
    live = start(SlowRunner(step_seconds=0.05))
    first = threading.Thread(target=live.generate, kwargs={"num_inference_steps": 10})
    first.start()
    live.runner.began.wait(5)
    client = raw(live, {"num_inference_steps": 7})
    while live.service.scheduler.status.waiting < 1:
        time.sleep(0.005)
    client.close()
    first.join()
    assert live.generate().status_code == 200
    assert [batch.num_inference_steps for batch in live.runner.batches] == [10, 2]


def test_health_is_quick_while_pictures_are_made_and_encoded(start):
    """CB-078"""
    live = start(SlowRunner(step_seconds=0.02))
    worker = threading.Thread(target=live.generate, kwargs={"num_inference_steps": 50})
    worker.start()
    live.runner.began.wait(5)
    times = []
    with httpx.Client(base_url=live.url) as client:
        for _ in range(20):
            begin = time.perf_counter()
            assert client.get("/health").status_code == 200
            times.append(time.perf_counter() - begin)
            time.sleep(0.02)
    worker.join()
    assert sorted(times)[-2] < 0.1


def watch_the_store(live, monkeypatch) -> tuple[list[str], list[str]]:
    """The questions to the job store on the event loop, and the ids that were to be cancelled."""
    asked, cancels = [], []
    for name in ("get", "list", "update"):
        real = getattr(live.service.jobs, name)

        def watched(*args, real=real, name=name, **kwargs):
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop()
                asked.append(name)
            if "cancel_requested" in kwargs:
                cancels.append(args[0])
            return real(*args, **kwargs)

        monkeypatch.setattr(live.service.jobs, name, watched)
    return asked, cancels


def test_a_stream_whose_client_left_before_it_began_is_stopped(start, monkeypatch):
    """And its record is written, but not on the event loop: a database may be locked."""
    live = start(SlowRunner(step_seconds=0.05))
    asked, _ = watch_the_store(live, monkeypatch)
    submit, entered, left = ImageWork._submit, threading.Event(), threading.Event()

    def late(self, on_preview):
        job = submit(self, on_preview)
        entered.set()
        left.wait(5)
        time.sleep(0.3)  # until the server has heard of it
        return job

    monkeypatch.setattr(ImageWork, "_submit", late)
    client = raw(live, {"num_inference_steps": 100, "stream": True})
    assert entered.wait(5)
    client.close()
    left.set()
    deadline = time.monotonic() + 4
    while not live.service.scheduler.idle:
        assert time.monotonic() < deadline, "it runs for nobody"
        time.sleep(0.02)
    assert asked == []


def test_a_job_that_ended_is_not_cancelled_and_no_store_is_asked_on_the_event_loop(
    start, monkeypatch
):
    live = start()
    asked, cancels = watch_the_store(live, monkeypatch)
    job_id = live.generate().json()["id"]
    assert "completed" in live.generate(stream=True).text
    assert live.http.get(f"/v1/jobs/{job_id}/events").status_code == 200
    assert live.http.get(f"/v1/jobs/{job_id}").status_code == 200
    assert (asked, cancels) == ([], [])
