"""CB-053, CB-056, CB-132: pictures by URL, data URL and base64, from an origin on loopback."""

from __future__ import annotations

import base64
import http.server
import io
import socket
import struct
import threading
import time
import zlib

import pytest
from PIL import Image

from runtime.entrypoints.http.conftest import SMALL, picture
from sglang.multimodal_gen.runtime.managers import url_policy

PNG = picture(size=(64, 48))
FORM = {"prompt": "x", "task_type": "TI2I"} | {k: str(v) for k, v in SMALL.items()}


class Origin(http.server.BaseHTTPRequestHandler):
    """Answers by path."""

    asked: list[tuple[str, str | None]] = []

    def do_GET(self) -> None:
        name = self.path.strip("/").partition("?")[0]
        self.asked.append((name, self.headers.get("host")))
        getattr(self, f"do_{name}", self.do_missing)()

    def answer(self, body=b"", status=200, kind="image/png", **headers) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def do_picture(self) -> None:
        self.answer(PNG)

    def do_octets(self) -> None:
        self.answer(PNG, kind="application/octet-stream")

    def do_missing(self) -> None:
        self.answer(status=404)

    def do_once(self) -> None:
        self.answer(status=302, location="/picture")

    def do_loop(self) -> None:
        self.answer(status=307, location="/loop")

    def do_nowhere(self) -> None:
        self.answer(status=302)

    def do_inward(self) -> None:
        self.answer(status=302, location="http://127.9.9.9/picture")

    def do_tofile(self) -> None:
        self.answer(status=302, location="file:///etc/passwd")

    def do_html(self) -> None:
        self.answer(b"<html>" * 50, kind="text/html")

    def do_text(self) -> None:
        self.answer(b"no picture" * 50)

    def do_gzip(self) -> None:
        self.answer(zlib.compress(PNG), **{"content-encoding": "deflate"})

    def do_declared(self) -> None:
        self.answer(b"x", **{"content-length": str(10 * 2**30)})

    def do_endless(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "image/png")
        self.end_headers()
        try:
            while True:
                self.wfile.write(bytes(2**20))
        except OSError:
            self.close_connection = True

    def do_drip(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "image/png")
        self.end_headers()
        try:
            for byte in PNG:
                self.wfile.write(bytes([byte]))
                time.sleep(0.05)
        except OSError:
            self.close_connection = True

    def do_broken(self) -> None:
        self.answer(PNG[:40], **{"content-length": str(len(PNG))})

    def log_message(self, *args) -> None:
        pass


@pytest.fixture(scope="module")
def origin():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Origin)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(5)


@pytest.fixture
def live(start, editor, origin):
    port = int(origin.rpartition(":")[2])
    Origin.asked.clear()
    return start(
        model=editor,
        fetch_ports=(port,),
        fetch_allow_networks=("127.0.0.1/32",),
        fetch_max_mb=1.0,
        fetch_timeout=1.0,
        fetch_max_redirects=2,
    )


def edit(live, image, **more):
    body = {"prompt": "x", "image": image, "task_type": "TI2I"} | SMALL | more
    return live.http.post("/v1/images/edits", json=body)


def test_a_picture_by_url_reaches_the_model(live, origin):
    for name in ("picture", "octets", "once", "picture?a=b"):
        assert edit(live, f"{origin}/{name}").status_code == 200, name
    batch = live.runner.batches[-1]
    assert len(batch.image_path) == 1
    assert origin.removeprefix("http://") == Origin.asked[-1][1]
    reply = edit(live, [f"{origin}/picture", {"image_url": f"{origin}/once"}], mask=None)
    assert reply.status_code == 200
    assert len(live.runner.batches[-1].image_path) == 2
    form = FORM | {"url": f"{origin}/picture"}
    files = {"other": ("", b"")}
    assert live.http.post("/v1/images/edits", data=form, files=files).status_code == 200


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("missing", "fetch_failed", "answered with 404"),
        ("loop", "fetch_failed", "more than 2 times"),
        ("nowhere", "fetch_failed", "more than 2 times"),
        ("inward", "fetch_not_allowed", "port 80"),
        ("tofile", "fetch_not_allowed", "scheme"),
        ("html", "fetch_failed", "content type"),
        ("text", "invalid_image", "no image"),
        ("gzip", "fetch_failed", "compressed"),
        ("declared", "too_large", "1 MiB"),
        ("endless", "too_large", "1 MiB"),
        ("drip", "fetch_failed", "within 1 s"),
        ("broken", "fetch_failed", "could not be fetched"),
    ],
)
def test_what_an_origin_may_do_wrong(live, origin, name, code, words):
    start = time.monotonic()
    error = live.refusal(edit(live, f"{origin}/{name}"))
    assert (error["code"], error["param"]) == (code, "image")
    assert words in error["message"]
    assert time.monotonic() - start < 3
    assert not live.runner.batches


def test_a_name_is_looked_up_once_and_each_hop_again(live, origin, monkeypatch):
    """A second look-up that says something else (DNS rebinding) is never asked for."""
    asked = []
    real = socket.getaddrinfo

    def lookup(host, port, *args, **kwargs):
        if str(host).endswith(".test"):
            asked.append(host)
            address = "127.0.0.1" if host == "good.test" else "10.0.0.1"
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]
        return real(host, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(url_policy.resolve, "__defaults__", (lookup,))
    port = origin.rpartition(":")[2]
    assert edit(live, f"http://good.test:{port}/picture").status_code == 200
    assert asked == ["good.test"]
    assert Origin.asked[-1] == ("picture", f"good.test:{port}")
    error = live.refusal(edit(live, f"http://bad.test:{port}/picture"))
    assert error["code"] == "fetch_not_allowed"
    assert len(Origin.asked) == 1


def test_nothing_inside_is_reached_without_a_flag(start, editor, origin):
    port = int(origin.rpartition(":")[2])
    Origin.asked.clear()
    live = start(model=editor, fetch_ports=(port,))
    for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0.0.0.0", "2130706433"):
        error = live.refusal(edit(live, f"http://{host}:{port}/picture"))
        assert error["code"] == "fetch_not_allowed", host
    closed = start(model=editor, fetch_urls=False, fetch_allow_networks=("127.0.0.0/8",))
    assert closed.refusal(edit(closed, f"{origin}/picture"))["code"] == "fetch_not_allowed"
    assert Origin.asked == []


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_data_urls_and_base64(live):
    noisy = picture(size=(9, 7))
    for image in (
        f"data:image/png;base64,{b64(noisy)}",
        f"DATA:image/png;base64,{b64(noisy)}",
        "data:;base64," + b64(noisy).rstrip("="),
        b64(noisy),
        base64.urlsafe_b64encode(noisy).decode(),
        "data:image/png," + "".join(f"%{byte:02x}" for byte in noisy),
    ):
        assert edit(live, image).status_code == 200, image[:30]
    for image, code in [
        ("data:text/html;base64,PGh0bWw+", "invalid_image"),
        ("data:image/png;base64,!!!!", "invalid_image"),
        ("data:image/png;base64,", "invalid_image"),
        ("data:image/png;base64,A", "invalid_image"),
        (b64(b"no picture at all" * 9), "invalid_image"),
        ("data:image/png;base64," + "A" * 2**21, "too_large"),
        ("A" * 2**21, "too_large"),
        ("A" * 40, "fetch_not_allowed"),
    ]:
        assert live.refusal(edit(live, image))["code"] == code, image[:30]


# What a small file may unpack to.


def flat_png(width: int, height: int) -> bytes:
    """A PNG of one colour, by hand: a library would hold all of it."""

    def chunk(name: bytes, data: bytes) -> bytes:
        body = name + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    packer = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    rows = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", rows), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


BOMBS = {
    "flat": flat_png(14000, 14000),
    "strip": flat_png(1, 400_000),
    "claim": flat_png(8, 8).replace(struct.pack(">II", 8, 8), struct.pack(">II", 2**31 - 1, 2**20)),
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("way", ["data", "base64", "form"])
def test_a_bomb_is_refused_by_its_header(live, name, way):
    data = BOMBS[name]
    assert len(data) < 700_000
    before, start = resident(), time.monotonic()
    if way == "form":
        response = live.http.post("/v1/images/edits", data=FORM, files={"image": data})
    else:
        response = edit(live, ("data:image/png;base64," if way == "data" else "") + b64(data))
    seconds = time.monotonic() - start
    assert live.refusal(response)["code"] == "invalid_image"
    assert resident() - before < 100 * 2**20
    assert seconds < 1
    assert not live.runner.batches


def test_an_animation_gives_its_first_frame_and_costs_no_more(live):
    frames = [Image.new("P", (64, 48), n % 200) for n in range(300)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    before = resident()
    assert edit(live, b64(buffer.getvalue())).status_code == 200
    assert resident() - before < 100 * 2**20
