from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang.multimodal_gen.runtime.loader.model_index import (
    class_in_folder,
    components_of,
    read_model_index,
)
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError


def test_components_are_pairs_and_the_rest_are_settings(tmp_path: Path) -> None:
    index = {
        "_class_name": "FluxPipeline",
        "_diffusers_version": "0.30.0",
        "vae": ["diffusers", "AutoencoderKL"],
        "tokenizer_2": ["transformers", "T5TokenizerFast"],
        "safety_checker": [None, None],
        "feature_extractor": None,
        "is_distilled": True,
        "boundary_ratio": 0.9,
        "sizes": [512, 1024],
        "extra": {"a": 1},
    }
    assert components_of(index, tmp_path) == {
        "vae": ("diffusers", "AutoencoderKL"),
        "tokenizer_2": ("transformers", "T5TokenizerFast"),
    }


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("vae", []),
        ("vae", ["diffusers"]),
        ("vae", ["diffusers", "AutoencoderKL", "x"]),
        ("vae", ["diffusers", None]),
        ("vae", ["diffusers", ""]),
        ("vae", ["diffusers", 3]),
        ("vae", [["diffusers", "AutoencoderKL"]]),
        ("../vae", ["diffusers", "AutoencoderKL"]),
        ("/etc", ["diffusers", "AutoencoderKL"]),
    ],
)
def test_a_malformed_entry_is_named(tmp_path: Path, name: str, entry: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        components_of({name: entry}, tmp_path)
    assert f"{tmp_path}/model_index.json: {name!r} must be [library, class]" in str(caught.value)


@pytest.mark.parametrize("content", [{}, {"_class_name": None}, {"_class_name": ""}, []])
def test_an_index_without_a_pipeline_is_refused(tmp_path: Path, content: object) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"model_index\.json"):
        read_model_index(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "found"),
    [
        ("config.json", {"_class_name": "A", "architectures": ["B"]}, ("diffusers", "A")),
        ("config.json", {"architectures": ["B", "C"]}, ("transformers", "B")),
        ("scheduler_config.json", {"_class_name": "S"}, ("diffusers", "S")),
        ("tokenizer_config.json", {"tokenizer_class": "T"}, ("transformers", "T")),
        ("config.json", {"architectures": []}, (None, None)),
        ("readme.json", {"_class_name": "A"}, (None, None)),
    ],
)
def test_a_components_own_files_say_its_class(tmp_path, file, content, found):
    (tmp_path / file).write_text(json.dumps(content))
    assert class_in_folder(tmp_path) == found
