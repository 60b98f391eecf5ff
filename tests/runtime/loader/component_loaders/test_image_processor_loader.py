from __future__ import annotations

import json

import pytest
from transformers import CLIPImageProcessorPil

from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import ComponentSpec
from sglang.multimodal_gen.runtime.loader.component_loaders.image_processor_loader import (
    ImageProcessorLoader,
)
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError


def load(folder, architecture="CLIPImageProcessor"):
    spec = ComponentSpec(
        name="image_processor", path=folder, library="transformers", architecture=architecture,
        precision="fp32", device="cpu",
    )  # fmt: skip
    return ImageProcessorLoader().load(spec).module


def test_it_is_the_folders_with_its_settings(tmp_path):
    CLIPImageProcessorPil(crop_size={"height": 20, "width": 20}).save_pretrained(tmp_path)
    processor = load(tmp_path)
    assert processor.crop_size.height == 20


@pytest.mark.parametrize(
    ("settings", "architecture", "message"),
    [
        (None, "CLIPImageProcessor", "preprocessor_config.json"),
        ({}, None, "names its class"),
        ({}, "CLIPTextModel", "is no image processor"),
        ({}, "NoSuchProcessor", "has no class NoSuchProcessor"),
    ],
)
def test_what_is_no_processor_is_the_checkpoints_fault(tmp_path, settings, architecture, message):
    if settings is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, architecture)
