"""The page before a server that makes videos: real jobs, and routes that serve a fixed clip."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest
from fastapi import APIRouter, Request
from fastapi.responses import Response

from runtime.entrypoints.http.browser import ask, launched, needs_chromium, ready, visit, works
from runtime.entrypoints.http.conftest import SlowRunner, picture
from sglang.multimodal_gen.configs.task_type import DataType
from sglang.multimodal_gen.runtime.managers.service import WorkOrder

pytestmark = [pytest.mark.slow, needs_chromium]
BASE = {"height": 48, "width": 64, "max_sequence_length": 16}


@pytest.fixture(scope="module")
def browser():
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def clip() -> bytes:
    """Half a second of grey getting brighter, as H.264 in MP4."""
    av = pytest.importorskip("av")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for index in range(4):
            pixels = np.full((48, 64, 3), 40 * index, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
        container.mux(stream.encode(None))
    return buffer.getvalue()


@pytest.fixture
def studio(start, clip):
    """A live server with video routes, and the bodies that they got."""
    live = start(SlowRunner(step_seconds=0.05))
    live.bodies = []
    router = APIRouter()

    @router.post("/v1/videos")
    async def create(request: Request):
        if request.headers["content-type"].startswith("multipart"):
            async with request.form() as form:
                body = dict(form.multi_items())
        else:
            body = await request.json()
        live.bodies.append(body)
        settings = BASE | {
            "prompt": body["prompt"],
            "num_inference_steps": int(body["num_inference_steps"]),
            "seed": 5,
        }
        order = WorkOrder(kind="video_generation", settings=settings, data_type=DataType.IMAGE)
        return {"id": live.service.submit(order).id, "object": "video", "status": "queued"}

    @router.get("/v1/videos/{video_id}/content")
    async def content(video_id: str):
        assert live.service.jobs.get(video_id).status == "completed"
        return Response(clip, media_type="video/mp4")

    live.server.config.app.include_router(router)
    return live


def as_video_model(page, live, *tasks):
    """Let /v1/models speak of tasks that make videos."""
    card = live.http.get("/v1/models").json()["data"][0]
    card["tasks"] = [
        {"name": name, "makes": "video", "image": image, "video": "no"} for name, image in tasks
    ]
    card["task_type"] = tasks[0][0]
    card["settings"] += [
        {"name": "num_frames", "kind": "integer", "default": 17, "help": "", "choices": []},
        {"name": "fps", "kind": "integer", "default": 8, "help": "", "choices": []},
    ]
    page.context.route("**/v1/models", lambda route: route.fulfill(json={"data": [card]}))


def opened(browser, live, *tasks):
    visiting = visit(browser, live.url)
    page = visiting.__enter__()
    as_video_model(page, live, *tasks)
    page.reload()
    ready(page)
    return visiting, page


def test_a_video_is_a_job_with_progress_and_then_plays(browser, studio):
    visiting, page = opened(browser, studio, ("T2V", "no"))
    try:
        assert page.get_by_role("button", name="Generate video").is_visible()
        assert not page.locator("[data-field=output_format]").is_visible()
        ask(page, "snow", num_inference_steps=20, num_frames=9, fps=12)
        page.locator(".run[data-state=running]").wait_for()
        page.wait_for_function(
            "() => Number(document.querySelector('[role=progressbar]')"
            ".getAttribute('aria-valuenow')) > 20"
        )
        page.locator(".gallery .work .badge").wait_for()
        (body,) = studio.bodies
        assert (body["prompt"], body["num_frames"], body["fps"]) == ("snow", 9, 12)
        (work,) = works(page)
        assert (work["kind"], work["seed"], work["format"]) == ("video", 5, "mp4")
        assert page.locator(".gallery .work img").evaluate("node => node.naturalWidth") == 64
        page.locator(".gallery .work").click()
        page.wait_for_function("() => document.querySelector('#viewer video')?.videoWidth === 64")
        assert page.locator("#viewer video").evaluate("node => node.controls")
    finally:
        visiting.__exit__(None, None, None)


def test_seconds_take_the_place_of_frames(browser, studio):
    visiting, page = opened(browser, studio, ("T2V", "no"))
    try:
        ask(page, "snow", num_inference_steps=2, seconds=1.5)
        page.locator(".gallery .work").wait_for()
        (body,) = studio.bodies
        assert body["seconds"] == "1.5"
        assert "num_frames" not in body
    finally:
        visiting.__exit__(None, None, None)


def test_a_reload_finds_a_video_that_goes_on(browser, studio):
    visiting, page = opened(browser, studio, ("T2V", "no"))
    try:
        ask(page, "snow", num_inference_steps=60)
        page.locator(".run[data-state=running]").wait_for()
        page.reload()
        ready(page)
        page.locator(".run[data-state=running]").wait_for()
        page.locator(".gallery .work").wait_for()
        assert len(studio.bodies) == 1
        assert works(page)[0]["prompt"] == "snow"
        page.reload()
        ready(page)
        page.locator(".gallery .work").wait_for()
        assert not page.locator(".run").count()  # it is not found again for ever
    finally:
        visiting.__exit__(None, None, None)


def test_a_video_is_cancelled(browser, studio):
    visiting, page = opened(browser, studio, ("T2V", "no"))
    try:
        ask(page, "snow", num_inference_steps=500)
        page.locator(".run[data-state=running]").wait_for()
        page.keyboard.press("Escape")
        page.locator(".run[data-state=cancelled]").wait_for()
        deadline = time.perf_counter() + 5
        while studio.service.scheduler.status.running and time.perf_counter() < deadline:
            time.sleep(0.02)
        assert not studio.service.scheduler.status.running
    finally:
        visiting.__exit__(None, None, None)


def test_a_first_picture_goes_along(browser, studio, tmp_path):
    file = tmp_path / "first.png"
    file.write_bytes(picture())
    visiting, page = opened(browser, studio, ("TI2V", "may"))
    try:
        page.locator("[data-field=image] input[type=file]").set_input_files(file)
        ask(page, "snow", num_inference_steps=2)
        page.locator(".gallery .work").wait_for()
        (body,) = studio.bodies
        assert body["input_reference"].filename == "first.png"
        assert body["num_frames"] == "17"
    finally:
        visiting.__exit__(None, None, None)
