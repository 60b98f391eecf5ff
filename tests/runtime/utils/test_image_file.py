import io
import os
import re
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest, OutputError
from sglang.multimodal_gen.runtime.utils.image_file import (
    FORMATS,
    MAX_INPUT_PIXELS,
    ImageMetadata,
    encode_image,
    image_format,
    input_image_size,
    load_input_image,
    read_metadata,
)

ABOUT = ImageMetadata(
    prompt="a café \U0001f642 [bold]\nsecond line",
    seed=2**63 - 1,
    model="org/model",
    parameters={"guidance_scale": 3.5, "negative_prompt": "unschön", "height": 16},
)


def picture(height: int = 16, width: int = 24) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 8, columns * 8, rows + columns], axis=-1).astype(np.uint8)


def saved(path: Path, image: Image.Image, **options) -> Path:
    image.save(path, **options)
    return path


def refusal(path: Path, **options) -> str:
    with pytest.raises(InvalidRequest) as raised:
        load_input_image(path, **options)
    assert raised.value.field == "image_path"
    message = str(raised.value)
    assert path.name in message
    return message


# Writing


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_picture_and_its_metadata_come_back(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(encode_image(picture(), image_format(path), metadata=ABOUT))
    assert read_metadata(path) == ABOUT
    with Image.open(path) as image:
        assert image.format == FORMATS[suffix]
        assert image.mode == "RGB"
        error = np.abs(np.asarray(image).astype(int) - picture()).mean()
    assert error == 0 if suffix == ".png" else error < 6


@pytest.mark.parametrize("suffix", FORMATS)
def test_transparency_is_kept_where_a_format_has_it(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    pixels = np.dstack((picture(), np.full(picture().shape[:2], 255, dtype=np.uint8)))
    pixels[:8, :8] = (0, 0, 0, 0)
    path.write_bytes(encode_image(pixels, image_format(path), metadata=ABOUT))
    assert read_metadata(path) == ABOUT
    with Image.open(path) as image:
        made = np.asarray(image)
    if FORMATS[suffix] == "JPEG":
        assert made.shape[2] == 3
        assert made[:6, :6].min() > 240, "laid over white"
    else:
        assert (made[..., 3] == pixels[..., 3]).all()
        kept = np.asarray(load_input_image(path, keep_alpha=True))
        assert (kept == made).all()


@pytest.mark.parametrize("suffix", FORMATS)
def test_metadata_can_be_left_out(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(encode_image(picture(), image_format(path)))
    assert read_metadata(path) is None
    assert b"org/model" not in path.read_bytes()


def test_a_png_holds_the_four_text_chunks_that_other_tools_read():
    data = encode_image(picture(), metadata=ABOUT)
    with Image.open(io.BytesIO(data)) as image:
        assert image.info["prompt"] == ABOUT.prompt
        assert image.info["seed"] == str(ABOUT.seed)
        assert image.info["model"] == "org/model"
        assert set(image.info) == {"prompt", "seed", "model", "parameters"}


@settings(deadline=None, max_examples=40)
@given(
    prompt=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=200),
    seed=st.integers(0),
)
@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_any_prompt_comes_back(tmp_path_factory, suffix, prompt, seed):
    path = tmp_path_factory.mktemp("any") / f"a{suffix}"
    about = ImageMetadata(prompt, seed, "m")
    path.write_bytes(encode_image(picture(), image_format(path), metadata=about))
    assert read_metadata(path) == about


@pytest.mark.parametrize("text", ["a\0b", "half a pair \ud83d"])
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_text_that_a_file_cannot_hold_does_not_lose_the_picture(tmp_path, format, text):
    path = tmp_path / "a"
    path.write_bytes(encode_image(picture(), format, metadata=ImageMetadata(text, 1, "m")))
    assert read_metadata(path) is not None


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_a_very_long_prompt_does_not_lose_the_picture(tmp_path, format):
    path = tmp_path / "a"
    about = ImageMetadata("\U0001f642" * 90_000, 1, "m", {"negative_prompt": "x" * 90_000})
    path.write_bytes(encode_image(picture(), format, metadata=about))
    found = read_metadata(path)
    assert found is not None
    assert (found.seed, found.model) == (1, "m")
    if format == "PNG":
        assert found == about
    else:
        assert found.prompt.endswith("[cut: 90000 characters]")


def test_quality_trades_size():
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for format in ("JPEG", "WEBP"):
        assert len(encode_image(noise, format, quality=20)) < len(encode_image(noise, format))


def test_suffixes_are_matched_in_any_case_and_unknown_ones_are_answered():
    assert image_format(Path("A.PNG")) == "PNG"
    with pytest.raises(OutputError, match=r"'\.jgp'.*\.png, \.jpg, \.jpeg, \.webp.*'\.jpg'\?"):
        image_format(Path("a.jgp"))
    with pytest.raises(OutputError, match="a suffix is missing"):
        image_format(Path("a"))


@pytest.mark.parametrize(
    "comment", [b"", b"ASCII\0\0\0nonsense", b"ASCII\0\0\0[1]", b'ASCII\0\0\0{"seed": "x"}']
)
def test_foreign_metadata_is_no_metadata(tmp_path, comment):
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9286] = comment
    path = saved(tmp_path / "a.jpg", Image.fromarray(picture()), exif=exif)
    assert read_metadata(path) is None


# Reading


def test_a_plain_picture_is_read_as_it_is(tmp_path):
    path = saved(tmp_path / "a.png", Image.fromarray(picture()))
    loaded = load_input_image(str(path))
    assert loaded.mode == "RGB"
    assert np.array_equal(np.asarray(loaded), picture())


@pytest.mark.parametrize("suffix", [".png", ".webp", ".tiff"])
def test_transparency_is_laid_over_white(tmp_path, suffix):
    pixels = np.zeros((2, 2, 4), dtype=np.uint8)
    pixels[0, 1] = (255, 0, 0, 255)
    pixels[1, 0] = (0, 0, 0, 127)
    options = {"lossless": True} if suffix == ".webp" else {}
    path = saved(tmp_path / f"a{suffix}", Image.fromarray(pixels), **options)
    result = np.asarray(load_input_image(path))
    assert result[0].tolist() == [[255, 255, 255], [255, 0, 0]]
    assert result[1, 0].tolist() == [128, 128, 128]


def test_grey_with_alpha_palettes_and_single_transparent_colours(tmp_path):
    grey = Image.fromarray(np.array([[[0, 0], [0, 255]]], dtype=np.uint8), "LA")
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 0, 0, 0])
    palette.putdata([0, 1])
    rgb = Image.new("RGB", (2, 1))
    rgb.putdata([(10, 20, 30), (0, 0, 0)])
    for image, options in (
        (grey, {}),
        (palette, {"transparency": 0}),
        (rgb, {"transparency": (10, 20, 30)}),
    ):
        path = saved(tmp_path / f"{image.mode}.png", image, **options)
        assert np.asarray(load_input_image(path)).tolist() == [[[255] * 3, [0] * 3]]


@pytest.mark.parametrize("suffix", [".png", ".tiff"])
def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path, suffix):
    values = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    path = saved(tmp_path / f"a{suffix}", Image.fromarray(values))
    assert np.asarray(load_input_image(path))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_more_than_sixteen_bits_are_refused(tmp_path):
    wide = Image.fromarray(np.array([[0, 2**20]], dtype=np.int32))
    assert "more than 16 bits" in refusal(saved(tmp_path / "a.tiff", wide))
    real = Image.fromarray(np.array([[0.0, 0.5]], dtype=np.float32))
    assert "floating-point" in refusal(saved(tmp_path / "b.tiff", real))


@pytest.mark.parametrize("mode", ["1", "L", "CMYK", "YCbCr"])
def test_other_colour_models_become_rgb(tmp_path, mode):
    image = Image.new("RGB", (4, 4), "white").convert(mode)
    loaded = load_input_image(saved(tmp_path / "a.tiff", image))
    assert loaded.mode == "RGB"
    assert loaded.getpixel((0, 0)) == (255, 255, 255)


def test_the_exif_orientation_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: turn by 90 degrees
    path = saved(tmp_path / "a.png", Image.fromarray(picture(16, 24)), exif=exif)
    loaded = load_input_image(path)
    assert loaded.size == (16, 24)
    assert np.array_equal(np.asarray(loaded), np.rot90(picture(16, 24), -1))


def test_of_an_animation_the_first_frame_is_taken(tmp_path):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    path = saved(tmp_path / "a.gif", frames[0], save_all=True, append_images=frames[1:])
    assert load_input_image(path).getpixel((0, 0)) == (255, 0, 0)


def bomb(path: Path, width: int, height: int) -> Path:
    """A PNG whose header promises more than the file holds."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    end = chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + end)
    return path


@pytest.mark.parametrize("side", [8300, 10_000, 14_000, 2**31 - 1])
@pytest.mark.parametrize("action", ["error", "ignore"])
def test_a_bomb_is_refused_by_its_header(tmp_path, side, action):
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        message = refusal(bomb(tmp_path / "a.png", side, side))
    assert f"at most {MAX_INPUT_PIXELS} pixels" in message


def test_the_limit_is_inclusive(tmp_path):
    path = saved(tmp_path / "a.png", Image.fromarray(picture(16, 24)))
    assert load_input_image(path, max_pixels=16 * 24)
    assert "24x16 pixels" in refusal(path, max_pixels=16 * 24 - 1)


def test_what_is_no_file_is_refused(tmp_path):
    assert "no such file" in refusal(tmp_path / "missing.png")
    assert "is a folder" in refusal(tmp_path)
    assert "is empty" in refusal(Path(saved_bytes(tmp_path / "a.png", b"")))
    os.mkfifo(tmp_path / "pipe.png")
    assert "no regular file" in refusal(tmp_path / "pipe.png")
    assert "no regular file" in refusal(Path("/dev/zero"))
    assert "cannot be looked at" in refusal(tmp_path / ("x" * 300))


def saved_bytes(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "data", [b"hello", b"<html></html>", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\0" * 100, b"\x89PNG"]
)
def test_what_is_no_image_is_refused(tmp_path, data):
    message = refusal(saved_bytes(tmp_path / "a.png", data))
    assert re.search("is no image that can be read. Give a PNG, JPEG|is damaged", message)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns about odd TIFF tags
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP"])
def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path, format):
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, format)
    data = buffer.getvalue()
    for kept in (20, len(data) // 4, len(data) // 2):
        refusal(saved_bytes(tmp_path / f"a{kept}", data[:kept]))


@settings(deadline=None, max_examples=60)
@given(place=st.floats(0, 1), byte=st.integers(0, 255), cut=st.floats(0.2, 1))
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "TIFF", "GIF", "AVIF"])
def test_damaged_bytes_give_a_picture_or_a_refusal(tmp_path_factory, format, place, byte, cut):
    buffer = io.BytesIO()
    Image.fromarray(picture()).save(buffer, format)
    data = bytearray(buffer.getvalue())
    data[int(place * (len(data) - 1))] = byte
    path = tmp_path_factory.mktemp("damaged") / "a"
    path.write_bytes(data[: int(cut * len(data))])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about odd TIFF tags
            assert load_input_image(path).mode == "RGB"
    except InvalidRequest:
        pass


@pytest.mark.parametrize(("orientation", "size"), [(None, (24, 16)), (3, (24, 16)), (6, (16, 24))])
def test_the_size_is_that_of_the_upright_picture(tmp_path, orientation, size):
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    path = tmp_path / "picture.jpg"
    Image.fromarray(picture()).save(path, exif=exif)
    assert input_image_size(path) == size == load_input_image(path).size


def test_the_size_of_no_picture_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="no such file"):
        input_image_size(tmp_path / "other.png")
    (tmp_path / "text.png").write_text("words")
    with pytest.raises(InvalidRequest, match="no image"):
        input_image_size(tmp_path / "text.png")
