"""CB-128 to CB-132, CB-135: whatever a client calls a thing, no file of that name is looked at."""

from __future__ import annotations

import builtins
import io
import os
import sys
from pathlib import Path

import pytest

from runtime.entrypoints.http.conftest import SMALL, picture

MARK = "secret-marker"
EVENTS = ("open", "os.listdir", "os.scandir", "os.remove", "os.rename")


def path_likes(folder: Path) -> list[str]:
    """A hundred ways to write the path of a file that is there."""
    plain = f"{folder}/{MARK}.png"
    up = "../" * 12 + plain.lstrip("/")
    names = [plain, up, f"{MARK}.png", f"./{MARK}.png", f"~/{MARK}.png", f"//{plain}"]
    names += [f"{scheme}{plain}" for scheme in (
        "file://", "file:", "FILE://", "file://localhost", "file:////", "ftp://x", "gopher://x",
        "jar:file://", "dict://x", "data:", "data:text/plain,", "php://filter/resource=", "s3:/",
        "unix:", "view-source:file://", "netdoc:", "smb:/", "http:", "blob:", "pathlib:", "local://",
    )]  # fmt: skip
    names += [plain.replace("/", s) for s in (
        "\\", "%2f", "%5c", "%252f", "\u2215", "\uff0f", "//", "/./", "\\\\", "/\u200b", "%c0%af",
    )]  # fmt: skip
    names += [up.replace("..", dots) for dots in (
        "..;", "%2e%2e", ".%2e", "\uff0e\uff0e", "\u2025", "....", "..\\", ". .", "..%00",
    )]  # fmt: skip
    names += [plain + end for end in (
        "\0", "\0.png", "%00", " ", "\n", "#", "?x", ";", "::$DATA", "/.", "/", "/..", "\r\n", "|",
        ":1:1", "=0.5", "@x", ",", "*", "[0]", "\t", "'", '"', "`", "$(x)", "${x}", "\\", "&x", "%",
    )]  # fmt: skip
    names += [start + plain for start in (
        " ", "\n", "\t", "'", '"', "`", "|", "<", ">", "@", "$(cat ", "; cat ", "&& cat ", "\ufeff",
        "\\\\?\\", "\\\\.\\", "\\\\localhost\\c$", "//localhost/", "{{", "${", "%", "-", "--", "!",
    )]  # fmt: skip
    assert len(set(names)) >= 100
    return names


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """What was asked of the file system with the marker in its name."""
    secret = tmp_path / f"{MARK}.png"
    secret.write_bytes(picture())
    seen: list[str] = []
    state = {"on": True}

    def hook(event: str, args: tuple) -> None:
        if state["on"] and event in EVENTS and MARK in str(args[:1]):
            seen.append(f"{event} {args[0]}")

    sys.addaudithook(hook)
    for name in ("stat", "lstat", "readlink", "access"):
        real = getattr(os, name)

        def asked(path, *args, _real=real, _name=name, **kwargs):
            if state["on"] and MARK in str(path):
                seen.append(f"{_name} {path}")
            return _real(path, *args, **kwargs)

        monkeypatch.setattr(os, name, asked)
    yield tmp_path, seen
    state["on"] = False  # an audit hook stays for good


def test_the_watch_sees(watched):
    folder, seen = watched
    open(folder / f"{MARK}.png").close()
    (folder / f"{MARK}.png").exists()
    io.open(folder / f"{MARK}.png").close()  # noqa: UP020
    assert len(seen) == 3
    assert builtins.open is io.open


STRINGS = ["model", "size", "response_format", "output_format", "background", "task_type", "lora",
           "user", "quality", "style", "moderation", "image_path", "mask_path", "video_path",
           "output_path", "output_file_name", "save", "lora_path"]  # fmt: skip


@pytest.mark.slow
def test_no_field_reaches_the_file_system(start, editor, watched):
    folder, seen = watched
    live = start(model=editor)
    body = {"prompt": "x"} | SMALL
    for name in path_likes(folder):
        for field in STRINGS:
            reply = live.http.post("/v1/images/generations", json=body | {field: name})
            if field not in ("user", "quality", "style", "moderation"):
                assert reply.status_code in (400, 404), (field, name, reply.text)
            assert "Traceback" not in reply.text
        for place in ({"image": name}, {"images": [{"image_url": name}]},
                      {"image": ["x" * 70], "mask": name}):  # fmt: skip
            reply = live.http.post("/v1/images/edits", json=body | place)
            assert reply.status_code == 400
            assert str(folder) not in reply.json()["error"]["message"]
    assert seen == []


@pytest.mark.slow
def test_no_form_field_upload_name_or_id_does(start, editor, watched):
    folder, seen = watched
    live = start(model=editor)
    form = {"prompt": "x", "task_type": "TI2I"} | {k: str(v) for k, v in SMALL.items()}
    for name in path_likes(folder):
        for field in ("image", "url", "mask", "image[]"):
            files = {"other": ("", b"")}
            reply = live.http.post("/v1/images/edits", data=form | {field: name}, files=files)
            assert reply.status_code == 400
        files = {"image": (name, picture(), "image/png")}
        live.http.post("/v1/images/edits", data=form, files=files)
        quoted = "".join(f"%{byte:02x}" for byte in name.encode("utf-8", "surrogatepass"))
        for route in ("files/{}", "jobs/{}", "jobs/{}/cancel", "loras/{}", "models/{}"):
            for way in ("GET", "DELETE", "POST"):
                reply = live.http.request(way, "/v1/" + route.format(quoted))
                assert reply.status_code in (404, 405, 400), (way, route, name)
        reply = live.http.post("/v1/loras", json={"name": name, "file": name})
        assert reply.status_code in (400, 403)
    assert seen == []
    assert sorted(os.listdir(folder)) == [f"{MARK}.png"]


def test_an_adapters_place_is_no_oracle(start, tmp_path):
    """CB-135: one answer for what is there, what is not, and what is outside."""
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "outside.safetensors").write_bytes(b"x")
    (root / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    live = start(lora_root=str(root))
    answers = {
        live.http.post("/v1/loras", json={"name": "x", "file": file}).text
        for file in ("/root", "/nonexistent", "../outside.safetensors", "../nothing", "..", ".",
                     "link.safetensors", "nothing", "org/name", "/etc/passwd", "a\0b", "x" * 400)
    }  # fmt: skip
    assert len(answers) == 1
