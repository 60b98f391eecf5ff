"""``POST /v1/images/generations`` through the official client, and through raw HTTP."""

from __future__ import annotations

import base64
import io
import shutil
import threading
import time

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from runtime.entrypoints.http.conftest import SMALL, SlowRunner
from sglang.multimodal_gen.runtime.utils.errors import InternalError, OutOfMemory, WorkerDied
from sglang.multimodal_gen.runtime.utils.image_file import read_metadata


def opened(item) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(item.b64_json)))


EXTRA = {k: v for k, v in SMALL.items() if k != "size"}


@pytest.mark.parametrize("response_format", [None, "b64_json", "url"])
def test_the_official_client_gets_n_pictures(shared, response_format):
    """CB-007, CB-020, CB-021, CB-022: n pictures, in the form asked for, links that work."""
    given = {} if response_format is None else {"response_format": response_format}
    reply = shared.openai().images.generate(
        prompt="a fox", n=3, size="64x48", model="tiny", extra_body={"seed": 7, **EXTRA}, **given
    )
    assert [item.seed for item in reply.data] == [7, 8, 9]
    assert (reply.size, reply.output_format, reply.background) == ("6x4", "png", "opaque")
    assert reply.warnings == []
    bodies = set()
    for item in reply.data:
        assert (item.url is None) != (item.b64_json is None)
        assert (item.url is not None) == (response_format == "url")
        if item.url:
            assert item.url.startswith(shared.url + "/v1/files/")
            answer = httpx.get(item.url)
            assert answer.headers["content-type"] == "image/png"
            assert answer.headers["x-content-type-options"] == "nosniff"
            bodies.add(answer.content)
        else:
            bodies.add(base64.b64decode(item.b64_json))
    assert len(bodies) == 3
    assert {Image.open(io.BytesIO(body)).getpixel((0, 0)) for body in bodies} == {
        (seed,) * 3 for seed in (7, 8, 9)
    }


def test_a_link_follows_the_address_that_the_client_used(start):
    """CB-021: behind a proxy, and by another name."""
    live = start()
    body = {"prompt": "a fox", "response_format": "url"} | SMALL
    headers = {"host": "pictures.example:8443"}
    reply = live.http.post("/v1/images/generations", json=body, headers=headers)
    assert reply.json()["data"][0]["url"].startswith("http://pictures.example:8443/v1/files/")
    live = start(public_url="https://proxy.example/prefix/")
    url = live.generate(response_format="url").json()["data"][0]["url"]
    assert url.startswith("https://proxy.example/prefix/v1/files/")
    path = url.removeprefix("https://proxy.example/prefix")
    assert live.http.get(path).status_code == 200


def test_without_a_store_links_are_refused_and_pictures_are_not(start):
    live = start(file_store="off")
    assert live.refusal(live.generate(response_format="url"))["param"] == "response_format"
    assert live.runner.batches == []
    assert live.generate().status_code == 200


@pytest.mark.parametrize(
    ("name", "magic", "kind"),
    [("png", b"\x89PNG", "PNG"), ("jpeg", b"\xff\xd8\xff", "JPEG"), ("webp", b"RIFF", "WEBP")],
)
def test_bytes_are_of_the_format_asked_for(shared, name, magic, kind):
    """CB-023"""
    reply = shared.generate(output_format=name, output_compression=60).json()
    data = base64.b64decode(reply["data"][0]["b64_json"])
    assert data.startswith(magic)
    assert Image.open(io.BytesIO(data)).format == kind
    assert reply["output_format"] == name
    warned = any("output_compression" in text for text in reply["warnings"])
    assert warned == (name == "png")
    link = shared.generate(output_format=name, response_format="url").json()["data"][0]["url"]
    assert httpx.get(link).headers["content-type"] == f"image/{name}"


def test_a_picture_says_what_made_it_and_no_path_of_the_server(shared, tmp_path):
    reply = shared.generate(seed=5, guidance_scale=2.5).json()
    path = tmp_path / "a.png"
    path.write_bytes(base64.b64decode(reply["data"][0]["b64_json"]))
    about = read_metadata(path)
    assert (about.prompt, about.seed, about.model) == ("a fox", 5, "tiny")
    assert about.parameters["guidance_scale"] == 2.5
    assert not {"image_path", "mask_path"} & about.parameters.keys()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 0}, "n"), ({"n": -1}, "n"), ({"n": 1000}, "n"), ({"n": 2.5}, "n"), ({"n": "3"}, "n"),
        ({"n": True}, "n"),
        ({"size": "0x0"}, "size"), ({"size": "-64x-64"}, "size"), ({"size": "64"}, "size"),
        ({"size": "64X64"}, "size"), ({"size": "64*64"}, "size"), ({"size": "64x64x3"}, "size"),
        ({"size": ""}, "size"), ({"size": "99999999x64"}, "size"), ({"size": [64, 64]}, "size"),
        ({"size": "72x56"}, "size"), ({"size": "1000x1000"}, "size"),
        ({"size": "64000x64000"}, "size"),
        ({"size": "\u0661\u0662x64"}, "size"), ({"size": "64x64", "width": 64}, "size"),
        ({"size": None, "width": 70}, "width"),
        ({"prompt": ""}, "prompt"), ({"prompt": "   "}, "prompt"), ({"prompt": "\u200b"}, "prompt"),
        ({"prompt": None}, "prompt"), ({"prompt": ["a"]}, "prompt"), ({"prompt": 3}, "prompt"),
        ({"prompt": "x" * 8001}, "prompt"), ({"negative_prompt": "x" * 8001}, "negative_prompt"),
        *[({"num_inference_steps": v}, "num_inference_steps") for v in (0, -1, 1.5, "4", 10**9)],
        *[({"seed": v}, "seed") for v in (2**63, -5, 1.5, "abc", True, [], [1, 2])],
        ({"guidance_scal": 9}, "guidance_scal"), ({"flow_shift": 1}, "flow_shift"),
        ({"output_format": "tiff"}, "output_format"), ({"output_format": "JPG"}, "output_format"),
        ({"output_format": "../x"}, "output_format"), ({"output_path": "/etc/x"}, "output_path"),
        ({"output_file_name": "x"}, "output_file_name"), ({"image_path": "/etc/x"}, "image_path"),
        ({"num_outputs_per_prompt": 2}, "num_outputs_per_prompt"),
        ({"image": "/etc/passwd"}, "image"),
        ({"response_format": "path"}, "response_format"),
        ({"output_compression": 101}, "output_compression"),
        ({"background": "transparent"}, "background"), ({"background": "red"}, "background"),
        ({"partial_images": 2}, "partial_images"), ({"partial_images": 4, "stream": True},
                                                    "partial_images"),
        ({"stream": True, "response_format": "url"}, "response_format"),
        ({"stream": "yes"}, "stream"),
        ({"priority": 101}, "priority"), ({"timeout": 0}, "timeout"),
        ({"lora": ["/root/x.safetensors"]}, "lora"), ({"lora": ["../x/y"]}, "lora"),
        ({"lora": ["nothing"]}, "lora"), ({"lora": [{"path": "/root"}]}, "lora"),
        ({"lora": [{"name": "x", "weight": "big"}]}, "lora"),
        ({"task_type": "I2I"}, "task_type"), ({"task_type": "paint"}, "task_type"),
        ({"task_type": "T2V"}, "task_type"),
        ({"guidance_scale": -1}, "guidance_scale"), ({"guidance_scale": "NaN"}, "guidance_scale"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_name_before_any_work(shared, body, param):
    """CB-001, 002, 004, 007, 009, 010, 015, 016, 019, 023, 129, 132, 135"""
    before = len(shared.runner.batches)
    start = time.perf_counter()
    error = shared.refusal(shared.generate(**body))
    assert time.perf_counter() - start < 1
    assert (error["param"] or "").split(".")[0] == param, error
    assert error["type"] == "invalid_request_error"
    assert len(shared.runner.batches) == before


def test_a_size_off_the_grid_names_the_multiple(shared):
    """CB-001, CB-002: refused in the size's name, with what would do."""
    for width in (64, 68, 72, 76, 80, 88, 96):
        response = shared.generate(size=f"{width}x64")
        if width % 16 == 0:
            assert response.status_code == 200
        else:
            message = shared.refusal(response)["message"]
            assert "multiple of 16" in message
            assert f"size='{width}x64'" in message


def test_every_adapter_that_is_not_there_is_refused_alike(shared):
    """CB-135: no oracle of what the server's disk holds."""
    places = ["/root/a", "/nonexistent/a", "../../a", "org/name"]
    errors = [shared.refusal(shared.generate(lora=[place])) for place in places]
    texts = {e["message"].replace(repr(p), "X") for e, p in zip(errors, places, strict=True)}
    assert len(texts) == 1


def test_another_models_name_is_not_answered(shared):
    """CB-014"""
    error = shared.refusal(shared.generate(model="no-such-model"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'tiny'" in error["message"]
    with pytest.raises(openai.NotFoundError):
        shared.openai().images.generate(prompt="a fox", model="dall-e-3")
    assert shared.generate(model="tiny").status_code == 200


OPTIONAL = ["model", "n", "width", "height", "response_format", "output_format", "stream", "user",
            "output_compression", "background", "partial_images", "negative_prompt", "lora",
            "guidance_scale", "true_cfg_scale", "task_type", "priority", "timeout", "quality",
            "style", "moderation", "seed"]  # fmt: skip


@pytest.mark.parametrize("name", OPTIONAL)
def test_null_is_the_same_as_leaving_out(shared, name):
    """CB-005"""
    seed = {} if name == "seed" else {"seed": 4}
    reply = shared.generate(**seed, **{name: None})
    assert reply.status_code == 200, reply.text
    if name != "seed":
        plain = shared.generate(**seed).json()["data"]
        assert reply.json()["data"] == plain


@pytest.mark.parametrize(("name", "value"), [("guidance_scale", 0), ("seed", 0), ("priority", 0),
                                             ("true_cfg_scale", 0)])  # fmt: skip
def test_zero_is_a_value(shared, name, value):
    """CB-017"""
    reply = shared.generate(**{name: value})
    assert reply.status_code == 200, reply.text
    batch = shared.runner.batches[-1]
    if name in ("guidance_scale", "true_cfg_scale"):
        assert getattr(batch.request, name) == 0
    if name == "seed":
        assert batch.seeds == [0]


def test_seeds_left_out_differ_and_are_told(shared):
    """CB-018: and the told seed makes the same picture."""
    replies = [shared.generate(**kw).json() for kw in ({}, {}, {"seed": -1}, {"seed": -1})]
    seeds = [reply["data"][0]["seed"] for reply in replies]
    assert len(set(seeds)) == 4
    again = shared.generate(seed=seeds[0]).json()["data"][0]
    assert again["b64_json"] == replies[0]["data"][0]["b64_json"]
    for seed in (2**31, 2**32, 2**63 - 1):
        assert shared.generate(seed=seed).json()["data"][0]["seed"] == seed


def test_what_has_no_effect_is_said(shared):
    reply = shared.generate(quality="hd", style="vivid", moderation="low", user="u-1").json()
    assert [text.split("=")[0] for text in reply["warnings"]] == ["quality", "style", "moderation"]
    assert shared.generate(quality="auto").json()["warnings"] == []
    reply = shared.generate(true_cfg_scale=3.0).json()  # admission's own
    assert any("negative_prompt" in text for text in reply["warnings"])


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "application/json"), (b"{", "application/json"), (b"[]", "application/json"),
        (b'"a"', "application/json"), (b"null", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "application/json"),
        (b'{"prompt": "a", "guidance_scale": NaN}', "application/json"),
        (b'{"prompt": "a", "guidance_scale": Infinity}', "application/json"),
        (b'{"prompt": "\\ud800"}', "application/json"),
        (b'{"\\ud800": 1, "prompt": "a"}', "application/json"),
        (b"\xff\xfe", "application/json"), (b"prompt=a", "application/x-www-form-urlencoded"),
        (b'{"prompt": "a"}', "text/plain"), (b"\0" * 100, "image/png"),
    ],
)  # fmt: skip
def test_a_body_that_is_none_is_refused(shared, content, kind):
    response = shared.http.post(
        "/v1/images/generations", content=content, headers={"content-type": kind}
    )
    assert 400 <= response.status_code < 500
    shared.refusal(response, response.status_code)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner,
                                                                max_size=3),
    max_leaves=5,
)  # fmt: skip


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(values=st.dictionaries(st.sampled_from(["prompt", "size", *OPTIONAL]), JSON, max_size=4))
def test_no_value_of_any_kind_is_our_fault(shared, values):
    import json

    body = json.dumps({"prompt": "a"} | SMALL | values).encode("utf-8", "surrogatepass")
    headers = {"content-type": "application/json"}
    response = shared.http.post("/v1/images/generations", content=body, headers=headers)
    assert response.status_code < 500, (values, response.text)


def test_a_body_that_is_too_large_is_refused_declared_or_not(start):
    live = start(max_body_mb=0.01)
    big = b'{"prompt": "' + b"x" * 20_000 + b'"}'
    headers = {"content-type": "application/json"}
    response = live.http.post("/v1/images/generations", content=big, headers=headers)
    assert live.refusal(response, 413)["code"] == "too_large"
    chunks = (big[i : i + 1000] for i in range(0, len(big), 1000))
    response = live.http.post("/v1/images/generations", content=chunks, headers=headers)
    live.refusal(response, 413)


def test_an_operators_limits_hold(start):
    """CB-006: the cap on pixels, and on pictures a request."""
    live = start(max_images_per_request=2)
    assert "at most 2" in live.refusal(live.generate(n=3))["message"]
    assert live.generate(n=2).status_code == 200


# What the scheduler says, on the wire.


def test_a_full_queue_is_429_and_the_official_client_comes_again(start):
    live = start(SlowRunner(step_seconds=0.2), max_queued_requests=1)
    waiting = [threading.Thread(target=live.generate, kwargs={"guidance_scale": 1 + i / 10})
               for i in range(2)]  # fmt: skip
    waiting[0].start()
    live.runner.began.wait(5)
    waiting[1].start()
    while live.service.scheduler.status.waiting < 1:
        time.sleep(0.005)
    response = live.generate()
    error = live.refusal(response, 429)
    assert error["code"] == "queue_full"
    assert int(response.headers["retry-after"]) >= 1
    client = live.openai(max_retries=5)
    reply = client.images.generate(prompt="a fox", extra_body={**EXTRA, "seed": 3}, size="64x48")
    assert reply.data[0].seed == 3
    for thread in waiting:
        thread.join()


def test_a_deadline_of_the_request_is_504_and_stops_the_work(start):
    """CB-033: a deadline that fires cancels the work; there is no hidden one."""
    live = start(SlowRunner(step_seconds=0.05))
    response = live.generate(num_inference_steps=100, timeout=0.3)
    error = live.refusal(response, 504)
    assert error["code"] == "deadline_exceeded"
    assert response.headers["x-should-retry"] == "false"
    assert live.runner.steps < 15


def test_concurrent_requests_share_batches_and_each_gets_its_own(start):
    """CB-060 on the wire, with the batches counted."""
    live = start(SlowRunner(step_seconds=0.02))
    replies = {}

    def ask(seed):
        replies[seed] = live.generate(seed=seed, prompt=f"fox {seed}").json()["data"][0]

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(1, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {seed: reply["seed"] for seed, reply in replies.items()} == {s: s for s in range(1, 10)}
    assert max(live.runner.sizes) > 1
    assert sum(live.runner.sizes) == 9
    for seed, reply in replies.items():
        image = Image.open(io.BytesIO(base64.b64decode(reply["b64_json"])))
        assert image.getpixel((0, 0)) == (seed,) * 3


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (InternalError("secret /opt/x.py"), 500, "internal_error"),
        (ValueError("secret /opt/x.py"), 500, "internal_error"),
        (MemoryError("secret"), 500, "internal_error"),
        (OutOfMemory("640x640 did not fit"), 400, "out_of_memory"),
    ],
)
def test_a_failure_is_one_requests_and_tells_no_secrets(start, fault, status, code):
    """CB-072: the next request is served as if nothing had been."""
    live = start()
    before = live.generate(seed=5).json()["data"]
    live.runner.fail = lambda batch: fault
    response = live.generate(seed=5)
    error = live.refusal(response, status)
    assert error["code"] == code
    assert "secret" not in response.text
    live.runner.fail = lambda batch: None
    assert live.generate(seed=5).json()["data"] == before


def test_a_dead_worker_is_a_clear_error_and_health_says_so(start):
    live = start()
    live.runner.fail = lambda batch: WorkerDied("rank 1 was killed")
    response = live.generate()
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "worker_died"
    health = live.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "unhealthy")
    assert live.generate().status_code == 503


def test_a_full_disk_harms_links_alone(start, tmp_path):
    """CB-076: a clear 5xx, no truncated file, b64 unaffected."""
    live = start(file_store=str(tmp_path / "store"))
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_text("in the way")
    error = live.refusal(live.generate(response_format="url"), 507)
    assert error["code"] == "storage_full"
    assert live.generate().status_code == 200


def test_a_body_that_is_not_called_json_is_told_what_it_lacks(shared):
    headers = {"content-type": "application/x-www-form-urlencoded"}  # curl's, without -H
    reply = shared.http.post("/v1/images/generations", content=b'{"prompt": "a"}', headers=headers)
    assert reply.status_code == 400
    assert "Content-Type: application/json" in reply.json()["error"]["message"]
