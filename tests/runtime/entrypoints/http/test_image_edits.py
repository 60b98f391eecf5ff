"""``POST /v1/images/edits``: uploads, and everything that may be wrong with them."""

from __future__ import annotations

import base64
import io
import os
import struct
import tempfile
import time
import zlib
from pathlib import Path

import openai
import pytest
from PIL import Image

from runtime.entrypoints.http.conftest import SMALL, SlowRunner, picture
from sglang.multimodal_gen.runtime.utils.image_file import load_input_image, read_metadata

FIELDS = {k: str(v) for k, v in SMALL.items()} | {"task_type": "TI2I"}


class Looking(SlowRunner):
    """Opens the pictures as the first stage would."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[Image.Image]] = []

    def run(self, batch):
        self.seen.append([load_input_image(path) for path in batch.image_path])
        return super().run(batch)


@pytest.fixture
def live(start, editor, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return start(Looking(), editor)


def edit(live, files, **fields):
    return live.http.post(
        "/v1/images/edits", data={"prompt": "at night"} | FIELDS | fields, files=files
    )


def leftovers(tmp_path: Path) -> list[str]:
    return [name for name in os.listdir(tmp_path) if name.startswith("sglang-upload")]


COLOURS = [(200, 0, 0), (0, 200, 0), (0, 0, 200)]


def test_pictures_arrive_in_order_however_they_are_sent(live, tmp_path):
    """CB-024: the official client's list, repeated fields, and a single file; CB-075: inputs go."""
    three = [("a.png", picture(color=c), "image/png") for c in COLOURS]
    client = live.openai()
    options = {"prompt": "at night", "size": "64x48", "extra_body": {
               "task_type": "TI2I", "num_inference_steps": 2,
               "max_sequence_length": 16, "seed": 5}}  # fmt: skip
    reply = client.images.edit(image=three, **options)
    assert reply.data[0].seed == 5
    assert (reply.output_format, reply.size) == ("png", "6x4")
    answered = edit(live, [("image", f) for f in three])
    made = tmp_path / "made.png"
    made.write_bytes(base64.b64decode(answered.json()["data"][0]["b64_json"]))
    about = read_metadata(made)
    assert about is not None
    assert about.parameters["image_path"] == "given"  # so that a replay asks for them
    client.images.edit(image=three[0], **options)
    seen = [[image.getpixel((0, 0)) for image in images] for images in live.runner.seen]
    assert seen == [COLOURS, COLOURS, COLOURS[:1]]
    assert leftovers(tmp_path) == []


def test_text_fields_mean_what_json_means(live):
    """CB-019: multipart '42' equals JSON 42; CB-005: an empty text is the same as none."""
    files = {"image": picture()}
    reply = edit(live, files, seed="42", n="2", guidance_scale="0", user="", quality="").json()
    assert [item["seed"] for item in reply["data"]] == [42, 43]
    assert live.runner.batches[-1].request.guidance_scale == 0
    for fields, param in [
        ({"n": "2.5"}, "n"),
        ({"seed": "abc"}, "seed"),
        ({"prompt": ""}, "prompt"),
        ({"size": "72x64"}, "size"),
        ({"guidance_scal": "3"}, "guidance_scal"),
        ({"image_path": "/etc/passwd"}, "image_path"),
        ({"num_inference_steps": "0"}, "num_inference_steps"),
        ({"output_format": "../x"}, "output_format"),
    ]:
        assert live.refusal(edit(live, files, **fields))["param"] == param


@pytest.mark.parametrize("address", ["/etc/passwd", "file:///etc/passwd", "\\\\host\\x",
                                     "/dev/zero", "http://127.0.0.1:1/x.png",
                                     "data:text/html;base64", "/nonexistent"])  # fmt: skip
@pytest.mark.parametrize("field", ["image", "url", "mask"])
def test_places_are_never_looked_at(live, address, field):
    """CB-132: one answer for all, whatever is there."""
    fields = {field: address}
    files = {"image": picture()} if field == "mask" else {"other": ("", b"")}
    error = live.refusal(edit(live, files, **fields))
    assert error["code"] == "fetch_not_allowed"
    assert address not in error["message"]


@pytest.mark.parametrize(
    "name",
    ["../../../tmp/evil.png", "/tmp/evil.png", "..\\..\\evil.png", "a\0b.png", "%2e%2e/evil.png",
     "x" * 5000 + ".png"],
)  # fmt: skip
def test_an_uploads_name_is_never_used(live, tmp_path, name):
    """CB-128"""
    before = set(tmp_path.rglob("*"))
    response = edit(live, {"image": (name, picture(), "image/png")})
    assert response.status_code in (200, 400)
    deadline = time.monotonic() + 10  # its folder goes once the answer is on its way
    while set(tmp_path.rglob("*")) != before:
        assert time.monotonic() < deadline, set(tmp_path.rglob("*")) - before
        time.sleep(0.01)
    assert not Path("/tmp/evil.png").exists()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size, with a scrap of data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(
            ">I", zlib.crc32(kind + data))  # fmt: skip

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    scrap = zlib.compress(b"\0" * 100)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", scrap) + chunk(
        b"IEND", b"")  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [picture(format="JPEG", size=(400, 300))[:-300], b"not a picture", b"<html></html>", b"\0" * 50,
     b"", png_header(14_000, 14_000), png_header(2**31 - 1, 1), picture()[:40]],
    ids=["truncated", "text", "html", "zeros", "empty", "bomb", "strip", "cut"],
)  # fmt: skip
def test_broken_and_exploding_pictures_are_refused_at_once(live, data, tmp_path):
    """CB-053, CB-054: from the header, without memory, and the next request is served."""
    start = time.perf_counter()
    error = live.refusal(edit(live, {"image": ("a.png", data, "image/png")}))
    assert time.perf_counter() - start < 1
    assert error["param"] == "image"
    assert live.runner.batches == []
    assert leftovers(tmp_path) == []
    assert edit(live, {"image": picture()}).status_code == 200


@pytest.mark.parametrize("mode", ["RGBA", "LA", "L", "P", "CMYK", "1", "I;16"])
def test_pictures_of_every_mode_are_taken(live, mode):
    """CB-049"""
    buffer = io.BytesIO()
    image = Image.new("RGBA", (8, 6), (200, 30, 40, 0))
    image = Image.new(mode, (8, 6)) if mode in ("I;16", "CMYK") else image.convert(mode)
    image.save(buffer, "TIFF" if mode == "CMYK" else "PNG")
    assert edit(live, {"image": buffer.getvalue()}).status_code == 200
    if mode == "RGBA":
        assert live.runner.seen[-1][0].getpixel((0, 0)) == (255, 255, 255)  # laid over white


def test_what_is_missing_too_much_or_of_another_kind_is_said(live):
    assert live.refusal(edit(live, {"other": ("", b"")}))["param"] == "image"
    many = [("image", ("a.png", picture(), "image/png"))] * 17
    assert live.refusal(edit(live, many))["param"] == "image"
    response = live.http.post("/v1/images/edits", data={"prompt": "x"})
    assert live.refusal(response, 415)["code"] == "unsupported_media"
    for content in (b"", b"--x\r\n", b"garbage"):
        headers = {"content-type": "multipart/form-data; boundary=x"}
        response = live.http.post("/v1/images/edits", content=content, headers=headers)
        live.refusal(response)
    response = live.http.post("/v1/images/edits", content=b"x",
                              headers={"content-type": "multipart/form-data"})  # fmt: skip
    live.refusal(response)


def test_a_mask_that_no_model_uses_is_refused_and_not_ignored(live, tmp_path):
    """CB-052"""
    files = {"image": picture(), "mask": picture(mode="L", color=0)}
    assert live.refusal(edit(live, files))["param"] == "mask"
    files["mask"] = picture(size=(9, 9))
    assert "size of the first image" in live.refusal(edit(live, files))["message"]
    assert leftovers(tmp_path) == []


def test_a_model_without_pictures_says_so(start, tmp_path, monkeypatch):
    """CB-027"""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    live = start()
    error = live.refusal(edit(live, {"image": picture()}, task_type=""))
    assert error["param"] == "image"
    assert "T2I takes no input image" in error["message"]
    assert live.http.get("/v1/models").json()["data"][0]["accepts_images"] is False
    assert leftovers(tmp_path) == []


def test_capabilities_decide_what_a_model_accepts(live):
    """CB-027: the same model takes texts alone and texts with pictures; I2I wants one."""
    assert live.http.get("/v1/models").json()["data"][0]["accepts_images"] is True
    assert live.generate().status_code == 200
    assert live.runner.batches[-1].task_type.name == "T2I"
    assert edit(live, {"image": picture()}, task_type="TI2I").status_code == 200
    assert live.runner.batches[-1].task_type.name == "TI2I"
    assert live.refusal(live.generate(task_type="I2I"))["param"] == "image"
    error = live.refusal(edit(live, {"image": picture()}, task_type=""))
    assert error["param"] == "task_type"  # TI2I or I2I: declaration order never decides


def test_a_refused_edit_through_the_official_client(live):
    with pytest.raises(openai.BadRequestError) as caught:
        live.openai().images.edit(image=("x.png", b"nothing", "image/png"), prompt="x")
    assert caught.value.param == "image"
