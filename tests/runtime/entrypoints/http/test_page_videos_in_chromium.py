"""The page before a real server that makes videos: the toy family of clips."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import pytest

from runtime.entrypoints.http.browser import ask, launched, needs_chromium, ready, visit, works
from runtime.entrypoints.http.conftest import Live, picture
from runtime.entrypoints.http.video_server import describe, serving_clips, write_model
from sglang.multimodal_gen.runtime.managers.worker import Worker

pytestmark = [pytest.mark.slow, needs_chromium]
SMALL = {"width": 64, "height": 48}


@pytest.fixture(scope="module")
def browser():
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return describe(write_model(tmp_path_factory.mktemp("toy")))


@pytest.fixture(scope="module")
def worker(model):
    return Worker(model)


@pytest.fixture
def studio(model, worker) -> Iterator[Live]:
    with serving_clips(model, worker, step_seconds=0.05) as live:
        yield live


@contextlib.contextmanager
def opened(browser: Any, live: Live, **options: Any) -> Iterator[Any]:
    with visit(browser, live.url, **options) as page:
        ready(page)
        yield page


def videos(live: Live, **headers: str) -> list[dict[str, Any]]:
    """What the server was asked for, newest first."""
    return live.http.get("/v1/videos", headers=headers).json()["data"]


def first_frame(live: Live, video_id: str) -> np.ndarray:
    data = live.http.get(f"/v1/videos/{video_id}/content").content
    with av.open(io.BytesIO(data)) as container:
        return next(container.decode(video=0)).to_ndarray(format="rgb24")


def shown_small(page: Any, width: int, height: int) -> list[int]:
    """The colour in the middle of the newest work's small picture, which has a given size."""
    image = page.locator(".gallery .work img").first
    page.wait_for_function("image => image.complete", arg=image.element_handle())
    *size, red, green, blue, alpha = image.evaluate(
        """image => {
          const { naturalWidth: width, naturalHeight: height } = image;
          const canvas = Object.assign(document.createElement("canvas"), { width, height });
          const context = canvas.getContext("2d");
          context.drawImage(image, 0, 0);
          return [width, height, ...context.getImageData(width / 2, height / 2, 1, 1).data];
        }"""
    )
    assert (size, alpha) == ([width, height], 255)
    return [red, green, blue]


def idle(live: Live) -> bool:
    """Whether the server has nothing left to do, soon."""
    deadline = time.perf_counter() + 5
    while time.perf_counter() < deadline:
        status = live.service.scheduler.status
        if not status.running and not status.waiting:
            return True
        time.sleep(0.02)
    return False


def forgotten(page: Any) -> None:
    """Wait until the page holds no job that a reload would look for."""
    page.wait_for_function(
        """() => new Promise((resolve) => {
          indexedDB.open("sglang-gallery").onsuccess = (opened) => {
            const store = opened.target.result.transaction("jobs").objectStore("jobs");
            store.count().onsuccess = (count) => resolve(count.target.result === 0);
          };
        })"""
    )


def plays(page: Any) -> None:
    """The newest work, opened, is a video that moves on by itself and that a reader can stop."""
    page.locator(".gallery .work").first.click()
    page.wait_for_function("() => document.querySelector('#viewer video')?.videoWidth === 64")
    shown = "document.querySelector('#viewer video')"
    page.wait_for_function(f"() => {shown}.currentTime > 0.05 && !{shown}.error")
    assert page.evaluate(f"{shown}.controls")


def test_a_video_is_a_job_with_progress_and_then_plays(browser, studio):
    with opened(browser, studio) as page:
        assert page.get_by_role("button", name="Generate video").is_visible()
        assert not page.locator("[data-field=output_format]").is_visible()
        ask(page, "snow", **SMALL, num_inference_steps=20, num_frames=9, fps=12)
        page.locator(".run[data-state=running]").wait_for()
        page.wait_for_function(
            "() => { const now = Number(document.querySelector('[role=progressbar]')"
            ".getAttribute('aria-valuenow')); return now > 20 && now < 100; }"
        )
        page.locator(".gallery .work .badge").wait_for()
        (video,) = videos(studio)
        asked = (video["prompt"], video["size"], video["num_frames"], video["fps"])
        assert asked == ("snow", "64x48", 9, 12)
        (work,) = works(page)
        assert (work["kind"], work["format"], work["size"]) == ("video", "mp4", "64x48")
        assert [int(work["seed"])] == video["seeds"]
        file = studio.http.get(f"/v1/videos/{video['id']}/content").content
        assert work["bytes"] == len(file)
        assert shown_small(page, 64, 48) == pytest.approx(
            first_frame(studio, video["id"])[24, 32].tolist(), abs=24
        )
        plays(page)


def test_seconds_take_the_place_of_frames(browser, studio):
    with opened(browser, studio) as page:
        assert page.locator("input[name=num_frames]").input_value() == "9"
        ask(page, "snow", **SMALL, num_inference_steps=2, seconds=1.6)
        page.locator(".gallery .work").wait_for()
        (video,) = videos(studio)
        assert (video["num_frames"], video["fps"]) == (13, 8)


def test_what_the_server_refuses_stands_by_its_field(browser, studio):
    with opened(browser, studio, allowed=("400",)) as page:
        for name, value, said in [
            ("num_frames", 8, "try 5 or 9"),
            ("fps", 0, "at least 1"),
            ("seconds", 100_000, "at most"),
            ("n", 99, "at most 10"),
        ]:
            ask(page, "snow", **SMALL | {name: value})
            error = page.locator(f"[data-field={name}] .error")
            error.wait_for()
            assert said in error.text_content(), name
            page.get_by_role("button", name="Reset").click()
        assert not videos(studio)


def test_several_videos_of_one_request_are_works_of_their_own(browser, studio):
    with opened(browser, studio) as page:
        ask(page, "snow", **SMALL, num_inference_steps=2, n=2, seed=7)
        page.locator(".gallery .work").nth(1).wait_for()
        made = works(page)
        assert sorted(work["seed"] for work in made) == [7, 8]
        page.locator(".gallery .work").first.click()
        page.get_by_role("button", name="Use these settings").click()
        assert page.locator("input[name=num_frames]").input_value() == "9"
        assert page.get_by_label("Seed", exact=True).input_value() in ("7", "8")


def test_a_reload_finds_a_video_that_goes_on(browser, studio):
    with opened(browser, studio) as page:
        ask(page, "snow", **SMALL, num_inference_steps=60)
        page.locator(".run[data-state=running]").wait_for()
        page.reload()
        ready(page)
        page.locator(".run[data-state=running]").wait_for()
        page.locator(".gallery .work").wait_for()
        assert len(videos(studio)) == 1
        assert works(page)[0]["prompt"] == "snow"
        forgotten(page)
        page.reload()
        ready(page)
        page.locator(".gallery .work").wait_for()
        assert not page.locator(".run").count()  # it is not found again for ever


def test_a_reload_says_that_a_video_is_gone(browser, studio):
    """Deleted by somebody else meanwhile: said once, and not looked for again."""
    with opened(browser, studio, allowed=("404",)) as page:
        ask(page, "snow", **SMALL, num_inference_steps=500)
        page.locator(".run[data-state=running]").wait_for()
        page.goto("about:blank")
        (video,) = videos(studio)
        studio.http.delete(f"/v1/videos/{video['id']}").raise_for_status()
        page.goto(studio.url)
        ready(page)
        page.locator(".run[data-state=failed]").wait_for()
        forgotten(page)
        page.reload()
        ready(page)
        assert not page.locator(".run").count()


def test_a_video_is_cancelled(browser, studio):
    with opened(browser, studio) as page:
        ask(page, "snow", **SMALL, num_inference_steps=500)
        page.locator(".run[data-state=running]").wait_for()
        page.keyboard.press("Escape")
        page.locator(".run[data-state=cancelled]").wait_for()
        assert idle(studio)
        assert videos(studio)[0]["status"] == "cancelled"
        assert studio.runner.steps < 400
        forgotten(page)
        page.reload()
        ready(page)
        assert not page.locator(".run").count()


def test_a_video_is_cancelled_before_its_id_is_known(browser, studio):
    """The server may have taken it already: it is not left to run for nobody."""
    held = []
    with opened(browser, studio) as page:
        page.route("**/v1/videos", lambda route: held.append((route, route.fetch())))
        ask(page, "snow", **SMALL, num_inference_steps=500)
        page.locator(".run[data-state=sent]").wait_for()
        while not held:
            page.wait_for_timeout(20)
        page.keyboard.press("Escape")
        page.locator(".run[data-state=cancelled]").wait_for()
        assert studio.service.scheduler.status.running
        ((route, reply),) = held
        route.fulfill(response=reply)
        page.wait_for_timeout(200)
        assert idle(studio)
        assert videos(studio)[0]["status"] == "cancelled"


def test_a_first_picture_goes_along(browser, studio, tmp_path):
    red = tmp_path / "first.png"
    red.write_bytes(picture((64, 48), (250, 0, 0)))
    with opened(browser, studio) as page:
        assert not page.locator("[data-field=image]").is_visible()
        page.get_by_label("picture → video", exact=True).check(force=True)
        ask(page, "snow", **SMALL, num_inference_steps=2)
        page.get_by_text("this task needs a picture").wait_for()
        page.locator("[data-field=image] input[type=file]").set_input_files(red)
        ask(page, "snow", **SMALL, num_inference_steps=2, num_frames=5)
        page.locator(".gallery .work").wait_for()
        (video,) = videos(studio)
        assert (video["size"], video["num_frames"]) == ("64x48", 5)
        assert np.argmax(first_frame(studio, video["id"])[:8, :8].mean(axis=(0, 1))) == 0
        assert studio.service.jobs.get(video["id"]).settings["task_type"] == "I2V"
        plays(page)


def test_a_server_with_keys_makes_a_video_for_who_has_one(browser, model, worker):
    key, other = "k" * 20, "o" * 20
    with (
        serving_clips(model, worker, step_seconds=0.02, api_key=(key, other)) as live,
        visit(browser, live.url, allowed=("401",)) as page,
    ):
        page.get_by_label("API key").last.fill(key)
        page.keyboard.press("Enter")
        ready(page)
        ask(page, "snow", **SMALL, num_inference_steps=20)
        page.locator(".run[data-state=running]").wait_for()
        page.reload()  # the job is found again with the key of the tab
        ready(page)
        page.locator(".gallery .work").wait_for()
        plays(page)
        assert len(videos(live, authorization=f"Bearer {key}")) == 1
        assert not videos(live, authorization=f"Bearer {other}")
        assert works(page)[0]["prompt"] == "snow"
