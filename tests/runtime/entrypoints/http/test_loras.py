"""``/v1/loras`` on a model that takes adapters."""

from __future__ import annotations

import base64
import io
import os
import time

import pytest
from PIL import Image

from runtime.entrypoints.http.conftest import running
from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.entrypoints.http.opening import open_service
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.serving import ServingArgs

from parity.tiny_adapters import diffusers_adapter


@pytest.fixture(scope="module")
def live(folder, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    outside = tmp_path_factory.mktemp("outside")
    with DiffGenerator.from_pretrained(str(folder), device="cpu") as generator:
        model = generator.pipeline.get_module("transformer")
        diffusers_adapter(model, 0).save(root / "ink.safetensors")
        diffusers_adapter(model, 1).save(outside / "secret.safetensors")
    (root / "bad.safetensors").write_bytes(b"<html>not found</html>")
    os.symlink(outside / "secret.safetensors", root / "link.safetensors")
    args = ServerArgs.from_flat(model_path=str(folder), device="cpu", precision="fp32")
    serving = ServingArgs.from_flat(
        port=0, served_model_name="tiny", warmup_mode="off", lora_root=str(root)
    )
    quiet = lambda event: None  # noqa: E731
    with running(lambda kept: open_service(args, serving, kept, quiet), serving, None) as live:
        while live.context.lifecycle.phase == "loading":
            time.sleep(0.01)
        live.outside = outside
        yield live


def picture(live, **body):
    reply = live.generate(seed=1, size="32x32", num_inference_steps=1, **body)
    assert reply.status_code == 200, reply.text
    data = base64.b64decode(reply.json()["data"][0]["b64_json"])
    return Image.open(io.BytesIO(data)).tobytes()


def test_an_adapter_is_loaded_used_by_name_and_unloaded(live):
    base = picture(live)
    reply = live.http.post("/v1/loras", json={"name": "ink", "file": "ink.safetensors"})
    assert (reply.status_code, reply.json()["name"]) == (200, "ink")
    listed = live.http.get("/v1/loras").json()
    assert listed == {"object": "list", "data": [{"name": "ink"}], "active": {}}
    with_it = picture(live, lora=["ink=0.5"])
    assert with_it != base
    assert picture(live, lora=[{"name": "ink", "weight": 0.5}]) == with_it
    assert picture(live, lora=["ink=0"]) == base  # CB-017: 0 is a weight
    assert picture(live) == base
    error = live.refusal(live.generate(lora=["inc"]))
    assert "Did you mean 'ink'" in error["message"]
    assert live.http.delete("/v1/loras/ink").json() == {"deleted": True, "name": "ink"}
    live.refusal(live.generate(lora=["ink"]))
    live.refusal(live.http.delete("/v1/loras/ink"), 404)
    assert live.http.get("/v1/loras").json()["data"] == []


def test_only_files_under_the_roots_are_loaded_and_others_are_not_told_apart(live):
    """CB-135"""
    outside = str(live.outside / "secret.safetensors")
    texts = set()
    for file in ("/root", "/nonexistent", "../..", outside, "link.safetensors", "no.safetensors",
                 "org/name", ".", "a\0b", "x" * 400):  # fmt: skip
        response = live.http.post("/v1/loras", json={"name": "x", "file": file})
        error = live.refusal(response, 404)
        texts.add(error["message"])
    assert len(texts) == 1
    for name in ("", "a/b", "../x", "x" * 101, None, 3):
        response = live.http.post("/v1/loras", json={"name": name, "file": "ink.safetensors"})
        assert live.refusal(response)["param"] == "name"


def test_a_damaged_file_is_refused_without_its_path(live):
    response = live.http.post("/v1/loras", json={"name": "bad", "file": "bad.safetensors"})
    assert live.refusal(response)["code"] == "bad_file"


def test_without_a_root_clients_load_nothing(start):
    live = start()
    response = live.http.post("/v1/loras", json={"name": "x", "file": "x.safetensors"})
    assert live.refusal(response, 403)["code"] == "not_allowed"
