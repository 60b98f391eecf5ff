"""Picture processors: on Pillow, from either file, or a clear refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import ComponentSpec
from sglang.multimodal_gen.runtime.loader.component_loaders.picture_processor_loader import (
    PictureProcessorLoader,
)
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

from parity.tiny_qwen_image import tiny_picture_processor


def load(folder: Path):
    spec = ComponentSpec(
        name="processor",
        path=folder,
        library="transformers",
        architecture="Qwen2VLProcessor",
        precision="fp32",
        device="cpu",
    )
    return PictureProcessorLoader().load(spec).module


def test_a_folder_of_the_published_layout(tmp_path):
    tiny_picture_processor().save_pretrained(tmp_path)
    processor = load(tmp_path)
    assert type(processor).__name__ == "Qwen2VLImageProcessorPil"
    seen = processor(images=[Image.new("RGB", (56, 84))], return_tensors="pt")
    assert seen["image_grid_thw"].tolist() == [[1, 6, 4]]


def test_a_folder_of_transformers_5(tmp_path):
    tiny_picture_processor().save_pretrained(tmp_path)
    old = tmp_path / "preprocessor_config.json"
    whole = {"image_processor": json.loads(old.read_text()), "processor_class": "Qwen2VLProcessor"}
    old.unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    assert load(tmp_path).size["longest_edge"] == 28 * 28 * 24


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "has neither processor_config.json nor preprocessor_config.json"),
        ("{", "preprocessor_config.json"),
        ('{"image_processor_type": "Unheard"}', "no usable picture processor"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, content, problem):
    if content is not None:
        (tmp_path / "preprocessor_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=problem):
        load(tmp_path)
