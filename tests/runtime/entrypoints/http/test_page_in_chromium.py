"""The page in a real browser, before a real server with a runner that needs no model."""

from __future__ import annotations

import json
import re
import threading
import time

import pytest

from runtime.entrypoints.http.browser import (
    ask,
    launched,
    needs_chromium,
    ready,
    visit,
    works,
)
from runtime.entrypoints.http.conftest import SlowRunner, picture
from sglang.multimodal_gen.runtime.managers.service import GenerationService
from sglang.multimodal_gen.runtime.utils.errors import InternalError

pytestmark = [pytest.mark.slow, needs_chromium]
SMALL = {"width": 64, "height": 48, "num_inference_steps": 3, "seed": 7}


@pytest.fixture(scope="module")
def browser():
    with launched() as browser:
        yield browser


@pytest.fixture
def open_page(browser, start):
    """Opens the page of a new server: ``with open_page(runner, model) as (page, live)``."""
    import contextlib

    @contextlib.contextmanager
    def opened(runner=None, model=None, *, allowed=(), flags=None, **options):
        live = start(runner, model, **(flags or {}))
        with visit(browser, live.url, allowed=allowed, **options) as page:
            ready(page)
            yield page, live

    return opened


def done(page, count=1):
    page.locator(".gallery .work").nth(count - 1).wait_for()
    page.wait_for_function("() => !document.querySelector('.run:not([data-state=done])')")


def test_a_picture_from_prompt_to_gallery_and_after_a_reload(open_page):
    with open_page() as (page, live):
        assert page.get_by_text("Nothing here yet").is_visible()
        ask(page, "a small fox", **SMALL)
        done(page)
        (work,) = works(page)
        assert (work["seed"], work["size"], work["prompt"]) == (7, "6x4", "a small fox")
        assert work["bytes"] > 50
        batch = live.runner.batches[-1]
        assert (batch.width, batch.height, batch.num_inference_steps) == (64, 48, 3)
        page.reload()
        ready(page)
        page.locator(".gallery .work").wait_for()
        # What was typed is there as well.
        assert page.get_by_label("Prompt", exact=True).input_value() == "a small fox"
        assert page.locator("input[name=num_inference_steps]").input_value() == "3"


def test_progress_and_previews_are_shown_while_it_works(open_page):
    with open_page(SlowRunner(step_seconds=0.15)) as (page, _):
        ask(page, **SMALL | {"num_inference_steps": 12})
        page.locator(".tile.preview img").wait_for()
        bar = page.get_by_role("progressbar")
        first = int(bar.get_attribute("aria-valuenow") or 0)
        page.wait_for_function(
            "(was) => Number(document.querySelector('[role=progressbar]')"
            ".getAttribute('aria-valuenow')) > was",
            arg=first,
        )
        assert "Making" in page.locator(".run .status").text_content()
        assert re.search(r"percent|Making", page.locator("#live").text_content())
        done(page)
        assert page.locator("#live").text_content() == "Done"


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_cancel_stops_the_server_within_a_step(open_page, how):
    runner = SlowRunner(step_seconds=0.05)
    with open_page(runner) as (page, live):
        ask(page, **SMALL | {"num_inference_steps": 400})
        page.locator(".tile.preview img, .run[data-state=running]").first.wait_for()
        if how == "Escape":
            page.keyboard.press("Escape")
        else:
            page.get_by_role("button", name="Cancel").click()
        page.locator(".run[data-state=cancelled]").wait_for()
        page.wait_for_function(
            "() => fetch('server_info').then((r) => r.json()).then((i) => i.queue.running === 0)"
        )
        assert runner.steps < 100
        assert not works(page)
        page.get_by_role("button", name="Try again").click()  # and it can be asked for again
        page.locator(".run[data-state=running]").wait_for()
        page.keyboard.press("Escape")
        page.locator(".run[data-state=cancelled]").wait_for()
        assert live.http.get("/health").status_code == 200


def test_a_job_that_waits_says_so(open_page):
    with open_page(SlowRunner(step_seconds=0.05)) as (page, live):
        other = threading.Thread(target=live.generate, kwargs={"num_inference_steps": 60})
        other.start()
        live.runner.began.wait(5)
        ask(page, **SMALL)
        page.locator(".run").get_by_text("Waiting in the queue").wait_for()
        done(page)
        other.join()


def test_the_settings_of_a_work_can_be_used_again(open_page):
    with open_page() as (page, live):
        ask(page, "the first", **SMALL | {"n": 2, "guidance_scale": 2.5})
        done(page, 2)
        ask(page, "the second", **SMALL | {"n": 1, "num_inference_steps": 2, "seed": ""})
        done(page, 3)
        assert live.runner.batches[-1].seeds != [7]  # an empty field is a random seed
        page.locator(".gallery .work").nth(1).click()
        viewer = page.get_by_role("dialog")
        assert viewer.get_by_text("the first").is_visible()
        assert viewer.get_by_text("2.5").is_visible()
        viewer.get_by_role("button", name="Use these settings").click()
        seed = page.get_by_label("Seed", exact=True).input_value()
        assert seed in ("7", "8")
        page.keyboard.press("Control+Enter")
        done(page, 4)
        batch = live.runner.batches[-1]
        assert (batch.prompt, batch.seeds) == (["the first"], [int(seed)])
        assert (batch.num_inference_steps, batch.guidance_scale) == (3, 2.5)


def test_a_seed_beyond_what_javascript_counts_comes_back_whole(open_page):
    """CB-019"""
    seed = 2**63 - 1
    with open_page() as (page, live):
        ask(page, **SMALL | {"seed": seed})
        done(page)
        assert live.runner.batches[-1].seeds == [seed]
        assert works(page)[0]["seed"] == str(seed)
        page.locator(".gallery .work").click()
        page.get_by_role("button", name="Use the seed").click()
        assert page.get_by_label("Seed", exact=True).input_value() == str(seed)


def test_errors_stand_by_the_field_that_they_name(open_page):
    with open_page(allowed=("400",)) as (page, _):
        for name, value, said in [
            ("n", 99, "at most 10"),
            ("width", 65, "16"),
            ("num_inference_steps", 0, "at least 1"),
            ("seed", "12x", "whole number"),
            ("max_sequence_length", 100000, "at most"),
        ]:
            page.locator(f"input[name={name}]").fill(str(value)) if name != (
                "max_sequence_length"
            ) else page.evaluate(
                "v => { document.querySelector('input[name=max_sequence_length]').value = v }",
                value,
            )
            page.get_by_label("Prompt", exact=True).fill("a fox")
            page.keyboard.press("Control+Enter")
            field = page.locator(f"[data-field={'size' if name == 'width' else name}]")
            field.locator(".error").wait_for()
            assert said in field.locator(".error").text_content(), name
            wrong = page.evaluate("document.activeElement.getAttribute('aria-invalid')")
            assert wrong == "true", "the focus is where the mistake is"
            page.get_by_role("button", name="Reset").click()
            assert not field.locator(".error").is_visible()
        page.get_by_label("Prompt", exact=True).fill("")
        page.keyboard.press("Control+Enter")
        page.locator("[data-field=prompt] .error").wait_for()


def test_what_no_field_is_to_blame_for_is_told_with_the_run(open_page):
    runner = SlowRunner()
    runner.fail = lambda batch: InternalError("secret")
    with open_page(runner) as (page, _):
        ask(page, **SMALL)
        page.locator(".run[data-state=failed]").wait_for()
        alert = page.locator(".run [role=alert]")
        assert "its log says why" in alert.text_content()
        runner.fail = lambda batch: None
        page.get_by_role("button", name="Try again").click()
        done(page)


def test_a_full_queue_says_when_to_try_again(open_page):
    with open_page(
        SlowRunner(step_seconds=0.05), flags={"max_queued_requests": 1}, allowed=("429",)
    ) as (page, live):
        others = [
            threading.Thread(target=live.generate, kwargs={"num_inference_steps": steps})
            for steps in (60, 61)
        ]
        for other in others:
            other.start()
            time.sleep(0.3)
        ask(page, **SMALL)
        page.get_by_text("Try again in").wait_for()
        live.service.scheduler.hand_back()
        for other in others:
            other.join()


def test_a_key_is_asked_for_kept_for_the_tab_and_sent(browser, start):
    live = start()
    refusal = {"error": {"message": "a key, please", "type": "x", "param": None, "code": "no_key"}}
    seen = []

    def guard(route, request):
        key = request.headers.get("authorization")
        seen.append(key)
        if key == "Bearer right":
            route.continue_()
        else:
            route.fulfill(status=401, content_type="application/json", body=json.dumps(refusal))

    with visit(browser, "about:blank") as blank:
        context = blank.context
        context.route(re.compile("/v1/"), guard)
        page = context.new_page()
        page.goto(live.url)
        page.get_by_label("API key").last.fill("wrong")
        page.get_by_role("button", name="Continue").click()
        page.get_by_text("does not take this key").wait_for()
        page.get_by_label("API key").last.fill("right")
        page.keyboard.press("Enter")
        ready(page)
        assert None in seen
        ask(page, **SMALL)
        done(page)
        assert page.evaluate("Object.values(sessionStorage)") == ["right"]
        assert "right" not in page.evaluate("JSON.stringify(localStorage)")
        page.reload()
        ready(page)  # nobody is asked twice in a tab
        assert not page.get_by_role("dialog").is_visible()


def test_keys_walk_the_gallery_and_the_viewer(open_page):
    with open_page() as (page, _):
        ask(page, "one", **SMALL | {"n": 3})
        done(page, 3)
        page.locator(".gallery .work").first.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert (
            page.evaluate("[...document.querySelectorAll('.work')].indexOf(document.activeElement)")
            == 2
        )
        page.keyboard.press("ArrowLeft")
        # One stop for Tab, wherever one was.
        assert page.locator(".gallery [tabindex='0']").count() == 1
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        page.keyboard.press("Enter")
        viewer = page.get_by_role("dialog")
        seed = viewer.locator("dd").first.text_content()
        page.keyboard.press("ArrowRight")
        assert viewer.locator("dd").first.text_content() != seed
        page.keyboard.press("Escape")
        assert not viewer.is_visible()
        page.wait_for_function(
            "() => [...document.querySelectorAll('.work')].indexOf(document.activeElement) === 2"
        )
        page.keyboard.press("Delete")
        page.wait_for_function("() => document.querySelectorAll('.work').length === 2")
        assert page.evaluate("document.activeElement.className") == "work"


def test_tab_goes_through_the_form_in_reading_order(open_page):
    with open_page() as (page, _):
        page.get_by_label("Prompt", exact=True).focus()
        names = []
        for _ in range(14):
            page.keyboard.press("Tab")
            names.append(page.evaluate("document.activeElement.name || document.activeElement.id"))
        wanted = [
            "negative_prompt",
            "width",
            "height",
            "num_inference_steps",
            "guidance_scale",
            "n",
            "seed",
        ]
        assert [name for name in names if name in wanted] == wanted


def test_everything_to_use_has_a_name(open_page):
    with open_page() as (page, _):
        ask(page, **SMALL)
        done(page)
        nameless = page.evaluate(
            """() => [...document.querySelectorAll('button, input, select, textarea, a')]
              .filter((node) => !node.closest('[hidden], [aria-hidden=true]'))
              .filter((node) => !(node.labels?.length || node.getAttribute('aria-label')
                || node.textContent.trim()))
              .map((node) => node.outerHTML)"""
        )
        assert nameless == []


def test_a_phone_of_320_pixels_has_no_sideways_scroll(open_page):
    with open_page(viewport={"width": 320, "height": 640}) as (page, _):
        sideways = "document.documentElement.scrollWidth"
        assert page.evaluate(sideways) == 320
        ask(page, "averyveryverylongwordwithoutanyspaces" * 4, **SMALL | {"n": 2})
        done(page, 2)
        assert page.evaluate(sideways) == 320
        page.locator(".gallery .work").first.click()
        box = page.get_by_role("dialog").bounding_box()
        assert box["width"] == 320
        assert page.locator("#viewer-delete").evaluate(
            "n => n.getBoundingClientRect().right <= 320"
        )
        page.keyboard.press("Escape")
        assert page.locator("#run").bounding_box()["height"] >= 36


def test_dark_and_light_follow_the_system_or_the_reader(open_page):
    with open_page(color_scheme="dark") as (page, _):
        ground = "getComputedStyle(document.documentElement).backgroundColor"
        dark = page.evaluate(ground)
        page.emulate_media(color_scheme="light")
        light = page.evaluate(ground)
        assert dark != light
        page.locator("#theme").click()
        page.locator("#theme").click()
        assert page.evaluate(ground) == dark
        page.reload()
        ready(page)
        assert page.evaluate(ground) == dark


def test_pictures_go_in_where_the_task_takes_them(open_page, editor, tmp_path):
    file = tmp_path / "in.png"
    file.write_bytes(picture())
    with open_page(model=editor) as (page, live):
        assert not page.locator("[data-field=image]").is_visible()  # text alone is the first task
        page.get_by_label("picture → image", exact=True).check(force=True)
        ask(page, **SMALL)
        page.get_by_text("this task needs a picture").or_(
            page.get_by_text("This task needs a picture")
        ).wait_for()
        page.locator("[data-field=image] input[type=file]").set_input_files([file, file])
        assert page.locator(".uploads img").count() == 2
        page.get_by_role("button", name="Remove in.png").first.click()
        assert page.locator(".uploads img").count() == 1
        ask(page, **SMALL)
        done(page)
        assert live.runner.batches[-1].request.task_type.name == "I2I"


def test_adapters_that_the_server_has_are_offered(browser, start, monkeypatch):
    monkeypatch.setattr(GenerationService, "adapter_names", property(lambda self: ["ink", "wash"]))
    live = start()
    sent = []
    with visit(browser, live.url) as page:
        ready(page)
        page.on("request", lambda request: sent.append(request.post_data))
        page.get_by_label("ink", exact=True).check()
        page.get_by_label("Weight of ink").fill("0.5")
        ask(page, **SMALL)
        page.locator(".run").wait_for()
    (body,) = [json.loads(data) for data in sent if data]
    assert body["lora"] == [{"name": "ink", "weight": 0.5}]


def test_a_download_has_a_name_that_says_what_it_is(open_page):
    with open_page() as (page, _):
        ask(page, "A fox/../in the snow", **SMALL)
        done(page)
        page.locator(".gallery .work").click()
        with page.expect_download() as download:
            page.get_by_role("link", name="Download").click()
        assert download.value.suggested_filename == "a-fox-in-the-snow-7.png"
        assert download.value.path().read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_it_waits_for_a_model_that_loads(browser, description):
    """CB-073"""
    from runtime.entrypoints.http.conftest import FLAGS, running
    from sglang.multimodal_gen.runtime.entrypoints.http.opening import service_of
    from sglang.multimodal_gen.runtime.server_args.serving import ServingArgs

    go, runner = threading.Event(), SlowRunner()
    serving = ServingArgs.from_flat(**FLAGS)

    def slowly(kept):
        go.wait(20)
        return service_of(description, runner, serving, kept)

    with (
        running(slowly, serving, runner) as live,
        visit(browser, live.url, allowed=("503",)) as page,
    ):
        page.get_by_text("The model is loading").wait_for()
        assert page.locator("#run").is_disabled()
        go.set()
        ready(page)
        assert page.locator("#run").is_enabled()


def test_the_schemas_page_asks_nobody_else(browser, start):
    live = start()
    with visit(browser, live.url) as page:
        page.goto(f"{live.url}/docs")
        page.locator(".opblock").first.wait_for()
        assert page.get_by_text("/v1/images/generations").is_visible()
