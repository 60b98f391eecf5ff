"""Clips as files: what browsers need, every frame, and what made them (casebook L)."""

from __future__ import annotations

import io
import sys

import av
import numpy as np
import pytest
from PIL import Image

from sglang.multimodal_gen.runtime.utils import video_file
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest, OutputError, UserError
from sglang.multimodal_gen.runtime.utils.image_file import ImageMetadata
from sglang.multimodal_gen.runtime.utils.video_file import (
    check_video_format,
    encode_frames,
    encode_video,
    load_input_video,
    read_video_metadata,
    video_format,
)

ABOUT = ImageMetadata("a café\nat night \u6f22", 2**63 - 1, "toy", {"num_frames": 9, "fps": 24})


def clip(frames=9, height=48, width=64) -> np.ndarray:
    """Smooth pictures that move: two waves and a ramp."""
    t, y, x = np.meshgrid(*map(np.arange, (frames, height, width)), indexing="ij")
    waves = [
        np.sin(x / 14 + t / 3),
        np.cos(y / 12 - t / 4),
        x / width + y / height + t / frames - 1.5,
    ]
    return np.stack([127 + 100 * wave.clip(-1, 1) for wave in waves], axis=-1).astype(np.uint8)


def opened(data: bytes) -> tuple[av.container.InputContainer, np.ndarray]:
    container = av.open(io.BytesIO(data))
    frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return container, np.stack(frames)


def psnr(a, b) -> float:
    error = np.square(a.astype(float) - b.astype(float)).mean()
    return 10 * np.log10(255**2 / max(error, 1e-9))


def test_a_browser_can_play_it():
    """CB-121."""
    data = encode_video(clip(), 24)
    container, _ = opened(data)
    stream = container.streams.video[0]
    codec = stream.codec_context
    assert (codec.name, codec.profile, codec.pix_fmt) == ("h264", "High", "yuv420p")
    assert (codec.colorspace, codec.color_primaries, codec.color_trc, codec.color_range) == (
        1, 1, 1, 1,
    )  # fmt: skip
    assert 0 < data.index(b"moov") < data.index(b"mdat")
    assert data[4:8] == b"ftyp"


@pytest.mark.parametrize("size", [(48, 64), (46, 66), (50, 70), (32, 24), (240, 322)])
def test_frames_keep_their_size_and_look(size):
    """CB-122: sizes that are no multiple of 16."""
    frames = clip(5, *size)
    _, seen = opened(encode_video(frames, 24))
    assert seen.shape == frames.shape
    assert psnr(frames, seen) > 35
    assert psnr(frames[::-1], seen) < 25  # the measure can tell


@pytest.mark.parametrize("size", [(47, 63), (48, 63), (47, 64), (1, 1)])
def test_odd_edges_get_a_copy_of_their_last_row_or_column(size):
    """CB-122."""
    frames = clip(3, *size)
    _, seen = opened(encode_video(frames, 24))
    height, width = size
    assert seen.shape == (3, height + height % 2, width + width % 2, 3)
    assert psnr(frames, seen[:, :height, :width]) > 33


@pytest.mark.parametrize("count", [1, 2, 5, 17, 81])
@pytest.mark.parametrize("fps", [1, 16, 24, 30, 240])
def test_all_frames_at_the_rate_asked_for(count, fps):
    """CB-123, CB-124, CB-125."""
    container, seen = opened(encode_video(clip(count, 16, 16), fps))
    stream = container.streams.video[0]
    assert len(seen) == stream.frames == count
    assert stream.average_rate == fps
    assert float(stream.duration * stream.time_base) == pytest.approx(count / fps)
    assert container.duration / 1e6 == pytest.approx(count / fps, abs=0.002)


def test_each_frame_is_at_its_place():
    frames = np.stack([np.full((16, 16, 3), 20 * k, np.uint8) for k in range(12)])
    _, seen = opened(encode_video(frames, 24))
    assert np.abs(seen.mean(axis=(1, 2, 3)) - 20 * np.arange(12)).max() < 4


@pytest.mark.parametrize("suffix", [".mp4", ".gif", ".webp"])
def test_what_made_it_is_in_the_file(suffix, tmp_path):
    path = tmp_path / f"clip{suffix}"
    path.write_bytes(encode_video(clip(), 24, video_format(path), metadata=ABOUT))
    assert read_video_metadata(path) == ABOUT
    path.write_bytes(encode_video(clip(), 24, video_format(path)))
    assert read_video_metadata(path) is None


def test_the_room_for_the_index_is_enough(tmp_path):
    """Long clips and long prompts: the muxer fails where the room is too small."""
    about = ImageMetadata("\u6f22" * 100_000, 1, "toy", {})
    for count in (1, 3000):
        frames = np.random.default_rng(0).integers(0, 255, (count, 16, 16, 3), dtype=np.uint8)
        data = encode_video(frames, 240, metadata=about)
        assert 0 < data.index(b"moov") < data.index(b"mdat")
        path = tmp_path / "long.mp4"
        path.write_bytes(data)
        assert read_video_metadata(path) == about


def test_no_temporary_file_is_made(monkeypatch, tmp_path):
    opened = []
    sys.addaudithook(lambda name, args: opened.append(args[0]) if name == "open" else None)
    monkeypatch.chdir(tmp_path)
    for format in ("MP4", "GIF", "WEBP"):
        encode_video(clip(), 24, format)
    written = [name for name in opened if isinstance(name, str) and not name.endswith((".py", "c"))]
    assert not written
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["GIF", "WEBP"])
@pytest.mark.parametrize("fps", [16, 24, 30])
def test_animations_last_as_long_as_the_clip(format, fps):
    image = Image.open(io.BytesIO(encode_video(clip(12), fps, format)))
    total = 0
    for index in range(image.n_frames):
        image.seek(index)
        image.load()
        total += image.info["duration"]
    assert image.n_frames == 12
    assert total == pytest.approx(12_000 / fps, abs=10)


def test_a_gif_that_no_browser_would_play_in_time_is_refused():
    check_video_format("GIF", 50)
    with pytest.raises(InvalidRequest, match=r"fps=51: a GIF plays at most 50 frames a second"):
        check_video_format("GIF", 51)


def test_frames_as_png_files_lose_nothing():
    files = encode_frames(clip(11), metadata=ABOUT)
    assert list(files) == [f"{k:05}.png" for k in range(11)]
    seen = np.stack([np.asarray(Image.open(io.BytesIO(data))) for data in files.values()])
    assert (seen == clip(11)).all()


def test_unknown_suffixes_are_refused(tmp_path):
    with pytest.raises(OutputError, match=r"'\.mov' is no video format .* \.mp4, \.gif, \.webp"):
        video_format(tmp_path / "x.mov")


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(video_file.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'sglang-diffusion\[video\]'"):
        encode_video(clip(), 24)
    check_video_format("WEBP", 24)  # needs none
    with pytest.raises(UserError, match="package av"):
        check_video_format("MP4", 24)


def test_a_build_without_an_encoder_is_told(monkeypatch):
    monkeypatch.setattr(av, "codecs_available", {"mpeg4"})
    with pytest.raises(UserError, match="no H.264 encoder"):
        encode_video(clip(), 24)


def test_a_video_is_read_back(tmp_path):
    path = tmp_path / "in.mp4"
    path.write_bytes(encode_video(clip(), 16))
    video = load_input_video(path)
    assert video.fps == 16
    assert psnr(video.frames, clip()) > 35


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is no video that can be read"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "is no video that can be read"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "is no video that can be read"),
        (None, "there is no such file"),
    ],
)
def test_what_is_no_video_is_refused(data, words, tmp_path):
    path = tmp_path / "in.mp4"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InvalidRequest, match=words):
        load_input_video(path)


def test_a_cut_file_and_a_large_one_are_refused(tmp_path):
    path = tmp_path / "in.mp4"
    data = encode_video(clip(), 16)
    path.write_bytes(data[: data.index(b"mdat") + 40])
    with pytest.raises(InvalidRequest, match="damaged|no frames"):
        load_input_video(path)
    path.write_bytes(data)
    assert len(load_input_video(path, max_pixels=9 * 48 * 64).frames) == 9
    with pytest.raises(InvalidRequest, match="has more than 27647 pixels in all its frames"):
        load_input_video(path, max_pixels=9 * 48 * 64 - 1)
