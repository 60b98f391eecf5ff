import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang.multimodal_gen.configs.sample.sampling_params import ImageSamplingParams
from sglang.multimodal_gen.runtime.entrypoints.cli import generate_options
from sglang.multimodal_gen.runtime.entrypoints.cli.generate_options import (
    GenerateArgs,
    GenerateOptions,
    read_options,
)
from sglang.multimodal_gen.runtime.utils.errors import (
    InvalidArgument,
    InvalidRequest,
    PipelineDefinitionError,
    UserError,
)

pytestmark = pytest.mark.usefixtures("generator")


def options(*argv: str) -> GenerateOptions:
    found = read_options(argv)
    assert found is not None
    return found


def config(name: str = "c.yaml", **settings: object) -> str:
    Path(name).write_text(json.dumps(settings))
    return name


def test_only_what_was_said_is_handed_on():
    found = options("--prompt", "x")
    assert found.sampling == {}
    assert found.prompts == ("x",)
    assert found.own == GenerateArgs(prompt="x")


def test_zero_is_a_value():
    assert options("--prompt=x", "--seed", "0", "--guidance-scale", "0").sampling == {
        "seed": 0,
        "guidance_scale": 0.0,
    }


def test_a_family_adds_its_own_flags():
    assert options("--prompt", "x", "--strength", "0.25").sampling == {"strength": 0.25}
    with pytest.raises(UserError, match=r"^unrecognized argument --strength\."):
        options("--prompt", "x", "--strength", "0.25", "--model-path", "other")


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults():
    path = config(
        **{
            "prompt": "from the file",
            "height": 32,
            "num-inference-steps": 7,
            "model_path": "other",
            "device": "cpu",
            "output-path": "elsewhere",
            "save_metadata": False,
            "component_precisions": {"vae": "fp32", "transformer": "bf16"},
        }
    )
    found = options(
        *("--config", path, "--prompt", "said", "--height", "16", "--model_path", "demo"),
        *("--component-precisions.vae", "fp16", "--save-metadata"),
    )
    assert found.prompts == ("said",)
    assert found.sampling == {"height": 16, "num_inference_steps": 7}
    assert found.server.model.model_path == "demo"
    assert found.server.platform.device == "cpu"
    assert found.own.output_path == "elsewhere"
    assert found.own.save_metadata is True
    assert found.server.model.component_precisions == {"vae": "fp16", "transformer": "bf16"}


def test_a_file_may_name_the_model_whose_flags_are_then_known():
    assert options("--config", config(prompt="x", strength=1)).sampling == {"strength": 1.0}
    path = config(prompt="x", strength=1, model_path="other")
    with pytest.raises(UserError, match=r"c\.yaml: there is no setting 'strength'\."):
        options("--config", path)


def test_an_unknown_setting_names_file_and_nearest():
    path = config(prompt="x", guidence_scale=3)
    with pytest.raises(UserError) as raised:
        options("--config", path)
    assert str(raised.value) == (
        "c.yaml: there is no setting 'guidence_scale'. Did you mean 'guidance_scale'?"
    )


def test_a_bad_value_in_a_file_names_the_file():
    for settings, problem in (
        ({"height": "128"}, "c.yaml: height='128': must be a whole number, not str"),
        ({"device": "gpu"}, "c.yaml: device='gpu': choose one of auto, cpu, cuda."),
    ):
        with pytest.raises(UserError) as raised:
            options("--config", config(prompt="x", **settings))
        assert str(raised.value).startswith(problem)


def test_a_model_that_needs_no_prompt_takes_none():
    assert options("--model-path", "promptless").prompts == ()


def test_settings_that_no_model_takes_are_refused_at_once():
    with pytest.raises(InvalidRequest, match="num_outputs_per_prompt=0"):
        options("--prompt", "x", "--num-outputs-per-prompt", "0")


def test_a_family_that_takes_a_flag_of_the_command_is_a_definition_error(monkeypatch):
    @dataclass
    class Clashing(ImageSamplingParams):
        quiet: bool = False

    monkeypatch.setattr(generate_options, "sampling_params_class", lambda *_: Clashing)
    with pytest.raises(PipelineDefinitionError, match=r"Clashing\.quiet claims the flag --quiet"):
        options("--prompt", "x")


def test_the_own_arguments_are_checked():
    with pytest.raises(InvalidArgument, match="quiet=1: must be true or false"):
        GenerateArgs(quiet=1)  # type: ignore[arg-type]


def test_help_lists_shared_flags_or_those_of_a_named_family(capsys):
    assert read_options(["--help"]) is None
    shared = capsys.readouterr().out
    assert "--guidance-scale" in shared
    assert "--strength" not in shared
    assert read_options(["-h", "--model-path", "demo"]) is None
    assert "--strength" in capsys.readouterr().out
    assert read_options(["-h", "--model-path", "missing"]) is None
    assert "model_path='missing' does not exist." in capsys.readouterr().out


def test_a_flag_of_videos_is_not_taken_for_a_mistyped_one():
    for words in (["--num-frames", "8"], ["--num_frames=8"]):
        with pytest.raises(UserError, match=r"frames: is for models that make videos"):
            options("--prompt", "x", *words)
