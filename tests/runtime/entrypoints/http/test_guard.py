"""CB-026, CB-134: keys before everything; what one key made is nobody else's; budgets."""

from __future__ import annotations

import hmac
import logging
import re

import openai
import pytest

from runtime.entrypoints.http.conftest import SMALL
from sglang.multimodal_gen.runtime.entrypoints.http.keys import KeyRing
from sglang.multimodal_gen.runtime.server_args.guard_section import GuardArgs, key_digest
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

ONE, TWO, ADMIN = "sk-one-4f1c", "sk-two-77aa", "sk-admin-9d02"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def locked(start):
    return start(api_key=(ONE, TWO), admin_api_key=ADMIN)


def generate(live, key, **body):
    body = {"prompt": "a fox"} | SMALL | body
    return live.http.post("/v1/images/generations", json=body, headers=bearer(key))


def refused(response, status, code):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    return error


def test_every_route_and_none_asks_for_the_key_first(locked):
    schema = locked.http.get("/openapi.json", headers=bearer(ONE)).json()
    routes = [(method, path) for path, item in schema["paths"].items() for method in item]
    routes += [("get", "/openapi.json"), ("get", "/docs"), ("get", "/nowhere"), ("get", "/pages")]
    routes += [("put", "/v1/loras"), ("brew", "/v1/models"), ("get", "/health/")]
    routes += [("get", "/"), ("get", "/page/style.css")]
    open_ones = {"/health", "/liveness", "/", "/page/style.css"}
    assert len(routes) > 18
    for method, path in routes:
        place = re.sub(r"\{\w+\}", "x", path)
        for headers in (
            {},
            bearer("wrong"),
            {"authorization": f"Basic {ONE}"},
            {"authorization": "Bearer"},
        ):
            response = locked.http.request(method, place, headers=headers)
            if path in open_ones:
                assert response.status_code == 200
                continue
            code = "invalid_api_key" if headers else "missing_api_key"
            refused(response, 401, code)
            assert response.headers["www-authenticate"].startswith("Bearer")
        if path not in open_ones:
            allowed = locked.http.request(method, place, headers=bearer(ADMIN))
            assert allowed.status_code != 401, path
    assert locked.http.get("/health?deep=1").status_code == 401
    assert locked.http.get("/health?deep=1", headers=bearer(ONE)).status_code == 200
    big = b"x" * (65 * 2**20)
    assert locked.http.post("/v1/images/edits", content=big).status_code == 401
    assert not locked.runner.batches


def test_metrics_may_be_open(start):
    live = start(api_key=ONE, metrics_without_key=True)
    assert live.http.get("/metrics").status_code == 200
    assert live.http.get("/server_info").status_code == 401


def test_the_official_client_shows_its_key(locked):
    for key, works in ((ONE, True), (TWO, True), ("wrong", False)):
        client = openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key, max_retries=0)
        if works:
            assert client.models.list().data[0].id == "tiny"
        else:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()


def test_what_one_key_made_another_does_not_see(locked):
    reply = generate(locked, ONE, response_format="url").json()
    job, url = f"/v1/jobs/{reply['id']}", reply["data"][0]["url"].removeprefix(locked.url)
    for path in (job, url):
        assert locked.http.get(path, headers=bearer(ONE)).status_code == 200
        assert locked.http.get(path, headers=bearer(ADMIN)).status_code == 200
        theirs = locked.http.get(path, headers=bearer(TWO))
        nothing = locked.http.get(path[:-4] + "0000", headers=bearer(TWO))
        assert (theirs.status_code, theirs.json()) == (404, nothing.json())
        assert locked.http.get(path).status_code == 401
    assert locked.http.post(f"{job}/cancel", headers=bearer(TWO)).status_code == 404
    record = locked.service.jobs.get(reply["id"])
    assert record.client.startswith("key-")
    assert ONE not in repr(record)


def test_adapters_are_the_operators(locked, start):
    for method, path in (("post", "/v1/loras"), ("delete", "/v1/loras/x"), ("post", "/v1/loras/")):
        refused(locked.http.request(method, path, headers=bearer(ONE)), 403, "not_allowed")
        assert locked.http.request(method, path, headers=bearer(ADMIN)).status_code != 403
    assert locked.http.get("/v1/loras", headers=bearer(ONE)).status_code == 200
    plain = start(api_key=ONE)
    answer = plain.http.delete("/v1/loras/x", headers=bearer(ONE))
    refused(answer, 404, "lora_not_found")


def test_without_keys_everybody_sees_everything(shared):
    reply = shared.generate(response_format="url").json()
    assert shared.http.get(f"/v1/jobs/{reply['id']}").status_code == 200
    assert shared.http.get(reply["data"][0]["url"]).status_code == 200


# Where keys come from, and where they do not go.


def test_keys_from_flags_a_file_and_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text(f"# ours\nsk-file # the first\n\n{key_digest('sk-hashed')}\n")
    monkeypatch.setenv("SGLANG_API_KEY", "sk-env, sk-env2")
    guard = GuardArgs(api_key="sk-flag", api_key_file=str(file))
    ring = KeyRing(guard)
    for key in ("sk-flag", "sk-file", "sk-hashed", "sk-env", "sk-env2"):
        assert ring.identify(bearer(key)).client
        assert key not in repr(guard)
    assert len({ring.identify(bearer(k)).client for k in ("sk-flag", "sk-file", "sk-env")}) == 3
    # A hash is no key: whoever read the file cannot come in with it.
    for digest in guard.digests:
        assert ring.identify(bearer(digest)) is None
    again = GuardArgs(api_key=guard.digests)
    assert set(again.digests) == set(guard.digests)


@pytest.mark.parametrize("key", ["", " ", "a b", "schlüssel", "a\nb", "\x00"])
def test_keys_that_no_client_could_show(key):
    with pytest.raises(InvalidArgument) as caught:
        GuardArgs(api_key=(key,))
    assert not key.strip() or key not in str(caught.value)


def test_a_file_without_keys_is_refused(tmp_path):
    (tmp_path / "empty").write_text("# nothing\n")
    for name in ("empty", "missing"):
        with pytest.raises(InvalidArgument, match="api_key_file"):
            GuardArgs(api_key_file=str(tmp_path / name))


def test_no_log_or_answer_has_a_key(locked, caplog):
    caplog.set_level(logging.DEBUG)
    logging.getLogger("sglang.requests").propagate = True
    generate(locked, ONE)
    generate(locked, "sk-guess-5150")
    generate(locked, TWO, n=99)
    info = locked.http.get("/server_info", headers=bearer(ADMIN)).text
    numbers = locked.http.get("/metrics", headers=bearer(ADMIN)).text
    lines = [str(record.__dict__) for record in caplog.records]
    assert any("/v1/images/generations" in line for line in lines)
    told = [*lines, info, numbers, repr(locked.context.args)]
    for key in (ONE, TWO, ADMIN, "sk-guess-5150"):
        assert not any(key in text for text in told)


def test_comparing_looks_at_every_key(monkeypatch):
    ring, seen = KeyRing(GuardArgs(api_key=(ONE, TWO), admin_api_key=ADMIN)), []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: seen.append(b) or real(a, b))
    for key in (ONE, TWO, ADMIN, "x"):
        seen.clear()
        ring.identify(bearer(key))
        assert len(seen) == 3


# Budgets.


def test_requests_a_minute_of_each_key(start):
    live = start(api_key=(ONE, TWO), requests_per_minute=3)
    left = [live.http.get("/v1/models", headers=bearer(ONE)) for _ in range(4)]
    assert [r.status_code for r in left] == [200, 200, 200, 429]
    assert [r.headers["x-ratelimit-remaining-requests"] for r in left] == ["2", "1", "0", "0"]
    assert left[0].headers["x-ratelimit-limit-requests"] == "3"
    refused(left[3], 429, "rate_limit_exceeded")
    assert 1 <= int(left[3].headers["retry-after"]) <= 60
    assert live.http.get("/v1/models", headers=bearer(TWO)).status_code == 200
    assert live.http.get("/v1/models", headers=bearer("wrong")).status_code == 401
    assert all(live.http.get("/health").status_code == 200 for _ in range(9))


def test_pictures_and_pixels_a_minute(start):
    live = start(images_per_minute=3)
    assert live.generate(n=2).status_code == 200
    response = live.generate(n=2)
    assert live.refusal(response, 429)["code"] == "rate_limit_exceeded"
    assert response.headers["x-ratelimit-remaining-images"] == "1"
    assert live.generate(n=1).status_code == 200
    assert live.refusal(live.generate(n=4))["param"] == "n"
    assert len([seed for batch in live.runner.batches for seed in batch.seeds]) == 3
    live = start(megapixels_per_minute=0.007)
    assert live.generate().status_code == 200  # 64x48 are 3072
    assert live.generate(size="bad").status_code == 400
    assert live.generate().status_code == 429 or live.generate().status_code == 429


def test_a_repeat_under_a_key_costs_nothing(start):
    live = start(images_per_minute=1)

    def post(key, **more):
        body = {"prompt": "a fox", "seed": 3} | SMALL | more
        return live.http.post("/v1/images/generations", json=body, headers={"idempotency-key": key})

    first = post("k")
    assert first.status_code == 200
    assert live.refusal(post("other"), 429)["code"] == "rate_limit_exceeded"
    assert post("k").json()["data"] == first.json()["data"]
    for other in ({"seed": 4}, {"num_inference_steps": 0}):
        assert live.refusal(post("k", **other), 422)["code"] == "idempotency_key_reused"
    assert len(live.runner.batches) == 1


def test_what_the_queue_refuses_costs_nothing(start):
    live = start(images_per_minute=2)
    live.service.scheduler.close("stopped for the test")
    for _ in range(5):
        assert live.generate().status_code == 503
    live.service.scheduler._closed = None
    assert [live.generate().status_code for _ in range(3)] == [200, 200, 429]
