"""``/v1/videos``: jobs, their states, and their files (casebook B, L and M)."""

from __future__ import annotations

import io
import time

import av
import numpy as np
import openai
import pytest
from PIL import Image

from runtime.entrypoints.http.conftest import Live, SlowRunner, picture
from runtime.entrypoints.http.video_server import (
    SMALL,
    alike,
    describe,
    post,
    serving_clips,
    until,
    write_model,
)
from sglang.multimodal_gen.runtime.managers.worker import Worker
from sglang.multimodal_gen.runtime.utils.video_file import read_video_metadata


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return describe(write_model(tmp_path_factory.mktemp("toy")))


@pytest.fixture(scope="module")
def worker(model):
    return Worker(model)


@pytest.fixture(scope="module")
def live(model, worker):
    with serving_clips(model, worker) as live:
        yield live


def content(live: Live, video_id: str, **query) -> bytes:
    response = live.http.get(f"/v1/videos/{video_id}/content", params=query)
    assert response.status_code == 200, response.text
    return response.content


def frames_of(data: bytes) -> np.ndarray:
    with av.open(io.BytesIO(data)) as container:
        return np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])


def make(live: Live, **body) -> np.ndarray:
    return frames_of(content(live, until(live, post(live, **body)["id"], "completed")["id"]))


def test_a_video_is_made_told_of_and_fetched(live, tmp_path):
    video = post(live, seed=7)
    assert video["status"] == "queued"
    assert (video["object"], video["model"], video["progress"]) == ("video", "toy", 0)
    assert (video["size"], video["num_frames"], video["fps"]) == ("48x32", 5, 8)
    assert video["prompt"] == "a red ball"
    done = until(live, video["id"])
    assert (done["status"], done["progress"], done["seeds"]) == ("completed", 100, [7])
    assert done["created_at"] <= done["completed_at"] <= done["expires_at"] - 3599
    assert done["error"] is None
    response = live.http.get(f"/v1/videos/{video['id']}/content")
    assert response.headers["content-type"] == "video/mp4"
    assert frames_of(response.content).shape == (5, 32, 48, 3)
    path = tmp_path / "clip.mp4"
    path.write_bytes(response.content)
    about = read_video_metadata(path)
    assert (about.prompt, about.seed, about.model) == ("a red ball", 7, "toy")
    assert (about.parameters["num_frames"], about.parameters["fps"]) == (5, 8)
    assert live.http.get(f"/v1/jobs/{video['id']}").json()["status"] == "completed"


def test_prompt_seed_frames_and_size_count(live):
    base = make(live, seed=1)
    assert np.array_equal(base, make(live, seed=1))
    for change in ({"seed": 2}, {"prompt": "the blue sea"}, {"num_inference_steps": 3}):
        other = make(live, **{"seed": 1} | change)
        assert not alike(base, other), change
    assert make(live, num_frames=9).shape == (9, 32, 48, 3)
    assert make(live, size="64x48").shape == (5, 48, 64, 3)


@pytest.mark.parametrize("frames", range(19))
def test_counts_of_frames_are_made_or_refused(live, frames):
    """CB-123: 4k + 1 are made, exactly; others are refused with their neighbours."""
    body = SMALL | {"num_frames": frames, "num_inference_steps": 1}
    response = live.http.post("/v1/videos", json=body)
    if frames % 4 == 1:
        video = until(live, response.json()["id"])
        assert video["num_frames"] == frames == len(frames_of(content(live, video["id"])))
        return
    error = live.refusal(response)
    assert error["param"] == "num_frames"
    if frames:
        assert f"try {(frames - 1) // 4 * 4 + 1} or {(frames - 1) // 4 * 4 + 5}" in error["message"]


def test_counts_of_frames_may_be_rounded_down_and_told(live):
    video = post(live, num_frames=8, num_frames_round_down=True)
    assert "rounded down to 5" in video["warnings"][0]
    done = until(live, video["id"])
    assert done["num_frames"] == 5 == len(frames_of(content(live, video["id"])))


@pytest.mark.parametrize(
    ("body", "frames", "fps", "seconds"),
    [
        ({"seconds": "1"}, 9, 8, "1"),
        ({"seconds": 2}, 17, 8, "2"),
        ({"seconds": 0.5}, 5, 8, "0.625"),
        ({"seconds": "1", "fps": 24}, 25, 24, "1"),
        ({"seconds": "0.01"}, 1, 8, "0.125"),
        ({"num_frames": 17, "fps": 16}, 17, 16, "1"),
        ({"num_frames": 13, "fps": 30}, 13, 30, "0.433"),
    ],
)
def test_length_is_as_asked_within_a_frame(live, body, frames, fps, seconds):
    """CB-124, CB-125: one rate for the reply and the file."""
    base = {k: v for k, v in SMALL.items() if k != "num_frames"} | {"num_inference_steps": 1}
    video = live.http.post("/v1/videos", json=base | body).json()
    assert (video["num_frames"], video["fps"], video["seconds"]) == (frames, fps, seconds)
    until(live, video["id"], "completed")
    with av.open(io.BytesIO(content(live, video["id"]))) as container:
        stream = container.streams.video[0]
        assert (stream.frames, stream.average_rate) == (frames, fps)
        assert float(stream.duration * stream.time_base) == pytest.approx(frames / fps)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"fps": 0}, "fps"),
        ({"fps": -1}, "fps"),
        ({"fps": 0.5}, "fps"),
        ({"fps": 1000}, "fps"),
        ({"fps": "24"}, "fps"),
        ({"fps": 23.976}, "fps"),
        ({"num_frames": -1}, "num_frames"),
        ({"num_frames": 5.5}, "num_frames"),
        ({"seconds": "1"}, "seconds"),  # beside num_frames
        ({"seconds": "0", "num_frames": None}, "seconds"),
        ({"seconds": "nan", "num_frames": None}, "seconds"),
        ({"seconds": "four", "num_frames": None}, "seconds"),
        ({"seconds": 80_000, "num_frames": None}, "seconds"),
        ({"size": "47x32"}, "size"),
        ({"size": "0x0"}, "size"),
        ({"n": 0}, "n"),
        ({"n": 11}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"prompt": " "}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"output_format": "../x"}, "output_format"),
        ({"output_format": "png"}, "output_format"),
        ({"output_path": "/etc/x"}, "output_path"),
        ({"video_path": "/etc/passwd"}, "video_path"),
        ({"image_path": "/etc/passwd"}, "image_path"),
        ({"input_reference": "/etc/passwd"}, "input_reference"),
        ({"input_reference": "file:///etc/passwd"}, "input_reference"),
        ({"input_reference": {"image_url": "/dev/zero"}}, "input_reference"),
        ({"input_reference": {"file_id": "file-1"}}, "input_reference"),
        ({"input_reference": {}}, "input_reference"),
        ({"guidance_scal": 9}, "guidance_scal"),
        ({"task_type": "T2I"}, "task_type"),
        ({"task_type": "I2V"}, "image"),
    ],
)
def test_wrong_values_are_refused_by_name(live, body, param):
    """CB-004, CB-010, CB-016, CB-017, CB-125, CB-129, CB-132."""
    assert live.refusal(live.http.post("/v1/videos", json=SMALL | body))["param"] == param


def test_null_and_an_empty_text_are_as_left_out(live):
    """CB-005."""
    names = ("seed", "fps", "seconds", "n", "size", "negative_prompt", "output_format", "model",
             "input_reference", "priority", "timeout", "lora", "task_type")  # fmt: skip
    base = {"prompt": "x", "num_frames": 1, "num_inference_steps": 1}
    video = live.http.post("/v1/videos", json=base | dict.fromkeys(names)).json()
    assert (video["size"], video["fps"]) == ("96x64", 8)
    form = {k: str(v) for k, v in base.items()} | dict.fromkeys(names, "")
    video = live.http.post("/v1/videos", files={k: (None, v) for k, v in form.items()}).json()
    assert (video["size"], video["fps"], video["num_frames"]) == ("96x64", 8, 1)


def test_several_videos_of_one_request_differ_and_can_be_made_alone(live):
    """CB-007, CB-008."""
    video = until(live, post(live, n=3, seed=7)["id"])
    assert (video["n"], video["seeds"]) == (3, [7, 8, 9])
    clips = [frames_of(content(live, video["id"], index=k)) for k in range(3)]
    for k in range(3):
        assert not alike(clips[k], clips[(k + 1) % 3])
        assert alike(clips[k], make(live, seed=7 + k))
    error = live.refusal(
        live.http.get(f"/v1/videos/{video['id']}/content", params={"index": 3}), status=404
    )
    assert error["param"] == "index"


@pytest.mark.parametrize(("format", "kind"), [("gif", "GIF"), ("webp", "WEBP")])
def test_other_formats(live, format, kind):
    """CB-023."""
    video = until(live, post(live, output_format=format)["id"])
    response = live.http.get(f"/v1/videos/{video['id']}/content")
    assert response.headers["content-type"] == f"image/{format}"
    image = Image.open(io.BytesIO(response.content))
    assert (image.format, image.size) == (kind, (48, 32))
    error = live.refusal(live.http.post("/v1/videos", json=SMALL | {"output_format": "gif",
                                                                    "fps": 60}))  # fmt: skip
    assert error["param"] == "fps"


def test_thumbnail(live):
    video = until(live, post(live, size="640x320", num_frames=1)["id"])
    first = frames_of(content(live, video["id"]))[0]
    response = live.http.get(f"/v1/videos/{video['id']}/content?variant=thumbnail")
    assert response.headers["content-type"] == "image/webp"
    image = Image.open(io.BytesIO(response.content))
    assert image.size == (320, 160)
    small = np.asarray(Image.fromarray(first).resize((320, 160))).astype(int)
    assert np.abs(small - np.asarray(image.convert("RGB"))).mean() < 6
    for variant in ("spritesheet", "other"):
        url = f"/v1/videos/{video['id']}/content?variant={variant}"
        assert live.refusal(live.http.get(url))["param"] == "variant"


def test_a_player_can_ask_for_parts(live):
    video = until(live, post(live)["id"])
    whole = content(live, video["id"])
    size = len(whole)

    def part(asked: str, **headers):
        headers = {"range": asked} | {k.replace("_", "-"): v for k, v in headers.items()}
        return live.http.get(f"/v1/videos/{video['id']}/content", headers=headers)

    for asked, start, stop in (
        ("bytes=0-99", 0, 100),
        ("bytes=100-", 100, size),
        ("bytes=-50", size - 50, size),
        (f"bytes=0-{size + 5}", 0, size),
        (f"bytes=-{size + 5}", 0, size),
    ):
        response = part(asked)
        assert response.status_code == 206, asked
        assert response.content == whole[start:stop]
        assert response.headers["content-range"] == f"bytes {start}-{stop - 1}/{size}"
        assert response.headers["accept-ranges"] == "bytes"
    for asked in (f"bytes={size}-", "bytes=-0"):
        response = part(asked)
        assert (response.status_code, response.content) == (416, b"")
        assert response.headers["content-range"] == f"bytes */{size}"
    for asked in ("bytes=5-2", "bytes=0-1,4-5", "lines=0-1", "bytes=-", "bytes=a-b"):
        assert part(asked).content == whole
    etag = part("bytes=0-1").headers["etag"]
    assert part("bytes=0-1", if_range=etag).status_code == 206
    assert part("bytes=0-1", if_range='"other"').content == whole


def test_a_first_picture_is_uploaded(live):
    """I2V through a form, by OpenAI's name and by the images'; CB-128."""
    red, blue = picture((48, 32), (250, 0, 0)), picture((48, 32), (0, 0, 250))
    form = {k: str(v) for k, v in SMALL.items()} | {"seed": "3"}

    def first_frame(name: str, file: bytes, filename="x.png") -> np.ndarray:
        files = {name: (filename, file, "image/png")}
        response = live.http.post("/v1/videos", data=form, files=files)
        assert response.status_code == 200, response.text
        until(live, response.json()["id"], "completed")
        return frames_of(content(live, response.json()["id"]))[0]

    for name in ("input_reference", "image", "input_reference[]"):
        assert np.argmax(first_frame(name, red).mean(axis=(0, 1))) == 0
    assert np.argmax(first_frame("input_reference", blue).mean(axis=(0, 1))) == 2
    for filename in ("../../../tmp/evil.png", "/etc/x.png", "a\\b\0c", "%2e%2e/", "x" * 500):
        first_frame("input_reference", red, filename)


def test_uploads_that_cannot_be_used_are_refused(live):
    form = {k: str(v) for k, v in SMALL.items()}

    def refused(name, data, kind):
        files = {name: ("x", data, kind)}
        return live.refusal(live.http.post("/v1/videos", data=form, files=files))

    assert refused("input_reference", b"no picture", "image/png")["code"] == "invalid_image"
    assert refused("video", b"no video", "video/mp4")["code"] == "invalid_video"
    clip = content(live, until(live, post(live)["id"])["id"])
    error = refused("input_reference", clip, "video/mp4")  # a good one, which this model refuses
    assert "it fits none of T2V, I2V" in error["message"]
    error = live.refusal(live.http.post("/v1/videos", data={"prompt": "x"} | {"image": "/etc/x"},
                                        files={"seed": (None, "1")}))  # fmt: skip
    assert error["code"] == "fetch_not_allowed"


def test_wrong_bodies(live):
    assert live.refusal(live.http.post("/v1/videos", json=[1]))["param"] is None
    for body in (b"", b"{", b"\xff"):
        headers = {"content-type": "application/json"}
        live.refusal(live.http.post("/v1/videos", content=body, headers=headers))
    headers = {"content-type": "text/plain"}
    live.refusal(live.http.post("/v1/videos", content=b"x", headers=headers), 400)


def test_pages(model, worker):
    with serving_clips(model, worker) as live:
        empty = live.http.get("/v1/videos").json()
        assert empty == {
            "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False,
        }  # fmt: skip
        ids = [post(live, num_inference_steps=1, num_frames=1)["id"] for _ in range(5)]

        def page(**query):
            reply = live.http.get("/v1/videos", params=query).json()
            found = [video["id"] for video in reply["data"]]
            assert (reply["first_id"], reply["last_id"]) == (found[0], found[-1])
            return found, reply["has_more"]

        assert page() == (ids[::-1], False)
        assert page(order="asc") == (ids, False)
        assert page(limit=2) == ([ids[4], ids[3]], True)
        assert page(limit=2, after=ids[3]) == ([ids[2], ids[1]], True)
        assert page(limit=2, after=ids[1]) == ([ids[0]], False)
        assert page(limit=3, after=ids[1], order="asc") == (ids[2:], False)
        for query in ({"limit": 0}, {"limit": 101}, {"order": "up"}):
            name = next(iter(query))
            assert live.refusal(live.http.get("/v1/videos", params=query))["param"] == name
        missing = live.http.get("/v1/videos", params={"after": "nothing"})
        assert live.refusal(missing, 404)["param"] == "after"


@pytest.mark.parametrize(
    "video_id", ["nothing", "..%2f..%2fetc%2fpasswd", "%2fetc%2fpasswd", "\u2025/x", "a" * 5000]
)
def test_ids_lead_nowhere_else(live, video_id):
    """CB-034, CB-130."""
    for method, url in (
        ("GET", f"/v1/videos/{video_id}"),
        ("GET", f"/v1/videos/{video_id}/content"),
        ("DELETE", f"/v1/videos/{video_id}"),
    ):
        live.refusal(live.http.request(method, url), 404)


def test_a_job_of_another_kind_is_no_video(start):
    live = start(SlowRunner())
    job = live.generate(seed=1).json()["id"]
    live.refusal(live.http.get(f"/v1/videos/{job}"), 404)
    assert live.http.get("/v1/videos").json()["data"] == []


def test_each_route_says_what_the_model_makes_instead(start, live):
    """CB-027."""
    error = live.refusal(live.http.post("/v1/images/generations", json={"prompt": "x"}))
    assert (error["param"], error["code"]) == ("model", "wrong_output")
    assert error["message"] == "model: 'toy' makes no images; use POST /v1/videos"
    files = {"image": ("x.png", picture(), "image/png")}
    edit = live.http.post("/v1/images/edits", data={"prompt": "x"}, files=files)
    assert live.refusal(edit)["code"] == "wrong_output"
    images = start(SlowRunner())
    for request in ({"json": {"prompt": "x"}}, {"files": files, "data": {"prompt": "x"}}):
        error = images.refusal(images.http.post("/v1/videos", **request))
        message = "model: 'tiny' makes no videos; use POST /v1/images/generations"
        assert error["message"] == message
    assert live.http.get("/v1/models").json()["data"][0]["task_type"] == "T2V"


def test_work_is_limited_as_a_whole(model, worker):
    """CB-006: n, frames and pixels together, and the limit is told."""
    with serving_clips(model, worker, max_video_pixels=5 * 32 * 48) as live:
        until(live, post(live)["id"], "completed")
        for more in ({"n": 2}, {"num_frames": 9}, {"size": "64x32"}):
            error = live.refusal(live.http.post("/v1/videos", json=SMALL | more))
            assert "7680" in error["message"], error
            assert error["param"] == "num_frames"
        base = {k: v for k, v in SMALL.items() if k != "num_frames"}
        error = live.refusal(live.http.post("/v1/videos", json=base | {"seconds": "2"}))
        assert error["param"] == "seconds"


def test_a_server_without_files_makes_no_videos(model, worker):
    with serving_clips(model, worker, file_store="off") as live:
        error = live.refusal(live.http.post("/v1/videos", json=SMALL))
        assert "keeps no files" in error["message"]


@pytest.fixture
def client(live):
    return live.openai()


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_openais_client_drives_it(live, client, tmp_path):
    """CB-028: create, poll, list, fetch, delete; also through a form with a file."""
    created = client.videos.create(prompt="a red ball", size="48x32", seconds="1",
                                   extra_body={"seed": 5, "num_inference_steps": 2})  # fmt: skip
    assert created.status == "queued"
    done = client.videos.create_and_poll(
        prompt="a red ball", size="48x32", model="toy", poll_interval_ms=20,
        input_reference=("x.png", picture((48, 32)), "image/png"),
    )  # fmt: skip
    assert (done.status, done.progress, done.seconds) == ("completed", 100, "1")
    done = client.videos.poll(created.id, poll_interval_ms=20)
    assert client.videos.retrieve(created.id) == done
    listed = [video.id for video in client.videos.list(limit=1)]  # pages one by one
    assert listed[1] == created.id
    assert listed == [video.id for video in client.videos.list(limit=100)]
    path = tmp_path / "x.mp4"
    client.videos.download_content(created.id).write_to_file(path)
    assert frames_of(path.read_bytes()).shape == (9, 32, 48, 3)
    small = client.videos.download_content(created.id, variant="thumbnail").read()
    assert Image.open(io.BytesIO(small)).format == "WEBP"
    deleted = client.videos.delete(created.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (created.id, True, "video.deleted")
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(created.id)
    with pytest.raises(openai.NotFoundError):
        client.videos.download_content(created.id)
    with pytest.raises(openai.BadRequestError, match="makes no images"):
        client.images.generate(prompt="x")
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.videos.create(prompt="x", model="sora-2")


def test_creating_answers_at_once(model, worker):
    """CB-028."""
    with serving_clips(model, worker, step_seconds=0.2) as live:
        start = time.perf_counter()
        video = post(live, num_inference_steps=5)
        assert time.perf_counter() - start < 0.5
        assert video["status"] == "queued"
        live.http.delete(f"/v1/videos/{video['id']}")
