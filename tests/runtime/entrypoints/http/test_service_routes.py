"""Models, health, jobs, files, adapters, and the schema."""

from __future__ import annotations

import re
import threading
import time

import openai
import pytest

from runtime.entrypoints.http.conftest import SlowRunner
from sglang.multimodal_gen.runtime.entrypoints.http.app import sweep


def test_models_and_health_are_where_tools_look(shared):
    """CB-026"""
    client = shared.openai()
    (card,) = client.models.list().data
    assert (card.id, card.object) == ("tiny", "model")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"
    assert card.size_multiple == 16
    assert "image_path" not in card.parameters
    for path in ("/health", "/health?deep=1", "/health/deep", "/liveness"):
        answer = shared.http.get(path)
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    info = shared.http.get("/server_info").json()
    assert (info["phase"], info["model"], info["device"]) == ("ready", "tiny", "cpu")
    assert "/tmp" not in str(info)
    shared.refusal(shared.http.get("/v1/nothing"), 404)
    shared.refusal(shared.http.put("/v1/models"), 405)


def test_a_runner_that_hangs_is_found_by_the_deep_question(start, monkeypatch):
    from sglang.multimodal_gen.runtime.entrypoints.http import health

    class Hanging(SlowRunner):
        def check(self):
            time.sleep(0.5)

    monkeypatch.setattr(health, "DEEP_SECONDS", 0.1)
    live = start(Hanging())
    assert live.http.get("/health").status_code == 200
    answer = live.http.get("/health?deep=1")
    assert (answer.status_code, answer.json()["status"]) == (503, "unhealthy")


def test_nothing_is_served_before_the_model_is_ready(description, start):
    """CB-073: 503 until usable; the first picture is as any other."""
    from runtime.entrypoints.http.conftest import FLAGS, running
    from sglang.multimodal_gen.runtime.entrypoints.http.opening import service_of
    from sglang.multimodal_gen.runtime.server_args.serving import ServingArgs

    go = threading.Event()
    runner, serving = SlowRunner(), ServingArgs.from_flat(**FLAGS)

    def slowly(kept):
        go.wait(10)
        return service_of(description, runner, serving, kept)

    with running(slowly, serving, runner) as live:
        answer = live.http.get("/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
        for response in (live.generate(), live.http.get("/v1/models"),
                         live.http.get("/v1/jobs/x"), live.http.get("/v1/loras"),
                         live.http.post("/v1/images/edits")):  # fmt: skip
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "unavailable"
            assert int(response.headers.get("retry-after", 1)) >= 1
        assert live.http.get("/liveness").status_code == 200
        go.set()
        while live.http.get("/health").status_code == 503:
            time.sleep(0.01)
        first = live.generate(seed=3).json()["data"]
        assert live.generate(seed=3).json()["data"] == first


# Jobs.


def poll(live, job_id):
    return live.http.get(f"/v1/jobs/{job_id}").json()


def test_a_jobs_record_tells_the_truth_at_every_moment(start):
    """CB-029: one in_progress at a time; progress rises; 100 at completed alone."""
    live = start(SlowRunner(step_seconds=0.01))
    threads = [threading.Thread(target=live.generate, kwargs={"num_inference_steps": 10 + i})
               for i in range(3)]  # fmt: skip
    for thread in threads:
        thread.start()
    while len(live.service.jobs) < 3:
        time.sleep(0.002)
    ids = [record.id for record in live.service.jobs.list()]
    logs = {job_id: [] for job_id in ids}
    while any(thread.is_alive() for thread in threads):
        states = {job_id: live.service.jobs.get(job_id) for job_id in ids}
        assert [r.status for r in states.values()].count("in_progress") <= 1
        for job_id, record in states.items():
            logs[job_id].append((record.status, record.progress))
        time.sleep(0.002)
    order = ["queued", "in_progress", "completed"]
    for job_id, log in logs.items():
        ranks = [order.index(status) for status, _ in log]
        assert ranks == sorted(ranks)
        progress = [percent for _, percent in log]
        assert progress == sorted(progress)
        assert all((percent == 100) == (status == "completed") for status, percent in log)
        reply = poll(live, job_id)
        assert (reply["status"], reply["progress"]) == ("completed", 100)
        assert len(reply["results"]) == 1
        assert reply["created_at"] <= reply["started_at"] <= reply["completed_at"]


def test_a_job_is_cancelled_by_its_id_running_or_waiting(start):
    """CB-030, CB-068"""
    live = start(SlowRunner(step_seconds=0.03))
    answers = {}

    def ask(name, **body):
        answers[name] = live.generate(**body)

    running = threading.Thread(target=ask, args=("a",), kwargs={"num_inference_steps": 300})
    running.start()
    live.runner.began.wait(5)
    waiting = threading.Thread(target=ask, args=("b",), kwargs={"num_inference_steps": 200})
    waiting.start()
    while len(live.service.jobs) < 2:
        time.sleep(0.002)
    a, b = (record.id for record in live.service.jobs.list(newest_first=False))
    assert poll(live, a)["status"] == "in_progress"
    assert poll(live, b)["status"] == "queued"
    for job_id in (b, a):
        reply = live.http.post(f"/v1/jobs/{job_id}/cancel").json()
        assert reply["status"] == "cancelled"
    running.join(3)
    waiting.join(3)
    assert [answers[name].status_code for name in "ab"] == [409, 409]
    assert answers["a"].json()["error"]["code"] == "cancelled"
    assert live.runner.sizes == [1]
    assert live.http.post(f"/v1/jobs/{a}/cancel").json()["status"] == "cancelled"


def test_unknown_ids_are_404_whatever_they_look_like(shared):
    """CB-034, CB-130"""
    for path in (
        "..%2f..%2fetc%2fpasswd",
        "%2Fetc%2Fpasswd",
        "\u2025",
        "x" * 3000,
        "0" * 32,
        "%00",
    ):
        shared.refusal(shared.http.get(f"/v1/files/{path}"), 404)
        shared.refusal(shared.http.get(f"/v1/jobs/{path}"), 404)
        shared.refusal(shared.http.post(f"/v1/jobs/{path}/cancel"), 404)


def test_files_and_records_expire_and_go(start, tmp_path):
    """CB-031"""
    live = start(file_ttl=1.0, job_ttl=1.0, file_store=str(tmp_path / "store"))
    reply = live.generate(response_format="url").json()
    link = reply["data"][0]["url"].removeprefix(live.url)
    assert live.http.get(link).status_code == 200
    record = poll(live, reply["id"])
    assert record["expires_at"] - record["completed_at"] == 1
    time.sleep(1.1)
    sweep(live.context)
    live.refusal(live.http.get(link), 404)
    live.refusal(live.http.get(f"/v1/jobs/{reply['id']}"), 404)
    assert [p for p in (tmp_path / "store").rglob("*") if p.is_file()] == []
    assert len(live.service.jobs) == 0


# The schema.


def test_the_schema_names_every_route_with_examples_and_errors(shared):
    schema = shared.http.get("/openapi.json").json()
    routes = {(method, path) for path, item in schema["paths"].items() for method in item}
    assert routes == {
        ("post", "/v1/images/generations"), ("post", "/v1/images/edits"), ("get", "/v1/models"),
        ("get", "/v1/models/{name}"), ("get", "/v1/jobs/{job_id}"),
        ("get", "/v1/jobs/{job_id}/content"), ("post", "/v1/jobs/{job_id}/cancel"),
        ("get", "/v1/jobs/{job_id}/events"), ("get", "/v1/files/{file_id}"),
        ("get", "/v1/loras"), ("post", "/v1/loras"), ("delete", "/v1/loras/{name}"),
        ("post", "/v1/videos"), ("get", "/v1/videos"), ("get", "/v1/videos/{video_id}"),
        ("delete", "/v1/videos/{video_id}"), ("get", "/v1/videos/{video_id}/content"),
        ("get", "/health"), ("get", "/health/deep"), ("get", "/liveness"), ("get", "/server_info"),
        ("get", "/metrics"),
    }  # fmt: skip
    for path, item in schema["paths"].items():
        for method, route in item.items():
            assert route["description"], (method, path)
            refused = route["responses"].get("422", {})  # of keys alone, and in our own shape
            assert not refused or "idempotency" in str(refused), (method, path)
            assert "HTTPValidationError" not in str(refused)
    for name in ("ImageGeneration", "ImageReply", "LoRALoad", "ErrorReply"):
        assert schema["components"]["schemas"][name]["examples"], name
    edits = schema["paths"]["/v1/images/edits"]["post"]["requestBody"]["content"]
    assert {"image", "mask", "prompt"} <= edits["multipart/form-data"]["schema"][
        "properties"].keys()  # fmt: skip
    create = schema["paths"]["/v1/videos"]["post"]["requestBody"]["content"]
    for kind in ("application/json", "multipart/form-data"):
        names = {"prompt", "seconds", "num_frames", "fps", "input_reference"}
        assert names <= create[kind]["schema"]["properties"].keys()
    for ref in set(_refs(schema)):
        assert ref.removeprefix("#/components/schemas/") in schema["components"]["schemas"]
    for example in schema["components"]["schemas"]["ImageGeneration"]["examples"]:
        body = {k: v for k, v in example.items() if k != "size"}
        assert shared.generate(**body).status_code == 200


def test_the_schemas_page_is_of_this_server_alone(shared):
    page = shared.http.get("/docs")
    places = re.findall(r'(?:src|href)="(docs[^"]+)"', page.text)
    assert len(places) == 3
    assert "//" not in page.text
    for place in places:
        file = shared.http.get(f"/{place}")
        assert file.status_code == 200
        assert file.headers["content-type"].partition(";")[0] in ("text/javascript", "text/css")
    assert "script-src 'self';" in page.headers["content-security-policy"]
    shared.refusal(shared.http.get("/docs/redoc.standalone.js"), 404)
    shared.refusal(shared.http.get("/docs/..%2f__init__.py"), 404)


def _refs(node):
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from _refs(value)
    elif isinstance(node, list):
        for value in node:
            yield from _refs(value)
