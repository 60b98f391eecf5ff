"""``sglang generate`` and ``sglang models`` on a model that has no native family."""

from __future__ import annotations

import json
import logging
import warnings

import pytest
from PIL import Image

from parity.tiny_pipelines import write_unet


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "unet"
    with warnings.catch_warnings():  # the libraries' own, about each other
        warnings.simplefilter("ignore")
        write_unet(path)
    return str(path)


@pytest.fixture(autouse=True)
def _quiet_logs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    level = logging.getLogger("sglang").level
    yield
    logging.getLogger("sglang").setLevel(level)


SMALL = ("--prompt", "a fox", "--height", "16", "--width", "16", "--num-inference-steps", "2",
         "--device", "cpu", "--seed", "1")  # fmt: skip


def test_a_picture_comes_out_and_one_line_says_who_made_it(sglang, folder):
    told = sglang("generate", "--model-path", folder, *SMALL, "--json",
                  "--diffusers-kwargs", '{"guidance_rescale": 0.5}')  # fmt: skip
    assert told.code == 0, told.err
    lines = [line for line in told.err.splitlines() if "backend diffusers" in line]
    assert lines == [
        "note: backend diffusers: no native family serves "
        f"_class_name='StableDiffusionPipeline' of {folder}"
    ]
    result = json.loads(told.out)
    assert result["backend"] == "diffusers"
    assert result["parameters"]["diffusers_kwargs"] == {"guidance_rescale": 0.5}
    with Image.open(result["images"][0]["path"]) as image:
        assert image.size == (16, 16)
        assert image.text["prompt"] == "a fox"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--true-cfg-scale", "2"), "takes no argument 'true_cfg_scale'"),
        (("--diffusers-kwargs", '{"etta": 1}'), "Did you mean 'eta'?"),
        (("--diffusers-kwargs", "eta"), "must be a JSON object"),
        (("--height", "15"), "divisible by 8"),
        (("--backend", "sglang"), "--backend diffusers"),
        (("--backend", "native"), "choose one of auto, sglang, diffusers"),
    ],
)
def test_mistakes_are_told_in_one_paragraph(sglang, folder, arguments, message):
    told = sglang("generate", "--model-path", folder, *SMALL, *arguments)
    assert told.code == 2
    assert message in told.err
    assert "Traceback" not in told.err


def test_help_lists_the_settings_of_the_backend(sglang, folder):
    told = sglang("generate", "--model-path", folder, "--help")
    assert "--diffusers-kwargs" in told.out


def test_its_two_stages_are_explained_without_loading(sglang, folder):
    told = sglang("models", "explain", folder, "--json")
    names = [row["class_name"] for row in json.loads(told.out)]
    assert names == ["InputValidationStage", "DiffusersExecutionStage"]
