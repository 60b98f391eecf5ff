"""Pictures in memory and by URL give what the same pictures give by path."""

from __future__ import annotations

import asyncio
import base64
import io

import numpy as np
import pytest
from PIL import Image

from sglang.multimodal_gen.runtime.entrypoints.http.image_fetch import ImageFetcher
from sglang.multimodal_gen.runtime.entrypoints.input_pictures import InputPictures
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest
from sglang.multimodal_gen.runtime.utils.image_file import load_input_image

GREY = np.asarray(Image.linear_gradient("L").resize((16, 16)))
COLOURS = Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8))


def _seen(given: object) -> np.ndarray:
    with InputPictures() as pictures:
        return np.asarray(load_input_image(pictures.named({"image_path": given})["image_path"]))


def _sixteen_bit(mode: str, dtype: str) -> Image.Image:
    return Image.frombytes(mode, (16, 16), (GREY.astype(dtype) * 257).astype(dtype).tobytes())


@pytest.mark.parametrize(
    "picture",
    [_sixteen_bit("I;16", "<u2"), _sixteen_bit("I;16B", ">u2"), _sixteen_bit("I", "<i4")],
    ids=lambda picture: picture.mode,
)
def test_sixteen_bits_are_scaled_whatever_their_order(picture: Image.Image) -> None:
    assert np.array_equal(_seen(picture)[..., 0], GREY)


@pytest.mark.parametrize("mode", ["RGBA", "RGBa", "PA", "LA", "La"])
def test_transparent_pictures_lie_over_white(mode: str) -> None:
    way = {"RGBA": [], "RGBa": ["RGBa"], "PA": ["P", "PA"], "LA": ["LA"], "La": ["LA", "La"]}[mode]
    picture = COLOURS if mode in ("PA", "LA", "La") else COLOURS.convert("RGBA")
    for step in way:
        if step in ("RGBa", "La"):
            picture.putalpha(0)
        picture = picture.convert(step)
    if mode not in ("RGBa", "La"):
        picture.putalpha(0)
    assert picture.mode == mode
    assert _seen(picture).min() == 255


def _cut_png() -> bytes:
    file = io.BytesIO()
    COLOURS.resize((64, 64)).save(file, "PNG")
    return file.getvalue()[:2000]


def _closed() -> Image.Image:
    file = io.BytesIO()
    COLOURS.save(file, "PNG")
    picture = Image.open(file)
    picture.close()
    return picture


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Image.open(io.BytesIO(_cut_png())), "damaged or incomplete"),
        (_closed(), "damaged or incomplete"),
        (Image.new("RGB", (0, 0)), "has no pixels"),
        ("data:image/png;base64,é", "no picture in base64"),
        ("file:///etc/passwd", "must be https or http"),
        ("http://127.0.0.1/x.png", "127.0.0.1"),
    ],
)
def test_what_is_no_picture_is_told(given: object, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        _seen(given)


def test_a_scheme_has_no_case() -> None:
    file = io.BytesIO()
    COLOURS.save(file, "PNG")
    url = "DATA:image/png;BASE64," + base64.b64encode(file.getvalue()).decode()
    assert np.array_equal(_seen(url), np.asarray(COLOURS))


def test_a_url_is_fetched_inside_a_running_event_loop_too(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    COLOURS.save(file, "PNG")

    async def answer(self: ImageFetcher, source: str, param: str) -> bytes:
        assert (source, param) == ("https://example.com/a.png", "image_path")
        return file.getvalue()

    monkeypatch.setattr(ImageFetcher, "_bytes_of", answer)

    async def notebook() -> np.ndarray:
        return _seen("https://example.com/a.png")

    assert np.array_equal(asyncio.run(notebook()), np.asarray(COLOURS))
