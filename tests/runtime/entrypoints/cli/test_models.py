import json
from types import SimpleNamespace

import pytest

import sglang.multimodal_gen.registry as registry
from sglang.multimodal_gen.registry import KnownModel
from sglang.multimodal_gen.runtime.entrypoints.cli import explained
from sglang.multimodal_gen.runtime.entrypoints.cli.explained import StageRow
from sglang.multimodal_gen.runtime.utils.errors import ModelNotFound

ROWS = [
    StageRow("input", "InputStage", "encoder", ("seeds",), ("generator",)),
    StageRow("[odd]", "ForeignStage", "denoiser", None, None),
    StageRow("last", "LastStage", "decoder", (), ()),
]


class SomeParams:
    pass


class SomeConfig:
    pass


@pytest.fixture(autouse=True)
def known(monkeypatch):
    model = KnownModel(
        pipelines=("SomePipeline",),
        paths=("org/some-model-with-a-long-name", "org/other"),
        sampling_params=SomeParams,  # type: ignore[arg-type]
        pipeline_config=SomeConfig,  # type: ignore[arg-type]
        task_types=("T2I", "TI2I"),
    )

    def explain(name: str) -> list[StageRow]:
        if name != "SomePipeline":
            raise ModelNotFound(f"{name!r} is no known pipeline.")
        return ROWS

    monkeypatch.setattr(registry, "known_models", lambda: [model])
    monkeypatch.setattr(explained, "explain", explain)
    return SimpleNamespace(model=model)


def test_families_paths_and_bundled_models_are_listed(sglang):
    outcome = sglang("models")
    assert outcome.code == 0
    for word in ("SomePipeline", "org/some-model-with-a-long-name", "org/other", "T2I, TI2I"):
        assert word in outcome.out
    assert "SomeParams" in outcome.out
    assert "bundled: " in outcome.out


def test_the_list_as_json(sglang):
    outcome = sglang("models", "--json")
    assert outcome.out.count("\n") == 1
    assert json.loads(outcome.out)["models"] == [
        {
            "pipelines": ["SomePipeline"],
            "paths": ["org/some-model-with-a-long-name", "org/other"],
            "task_types": ["T2I", "TI2I"],
            "sampling_params": "SomeParams",
            "pipeline_config": "SomeConfig",
        }
    ]


def test_a_pipeline_is_explained_stage_by_stage(sglang):
    lines = sglang("models", "explain", "SomePipeline").out.splitlines()
    table = [line.split() for line in lines if line.strip(" ─")]
    assert table == [
        ["stage", "class", "role", "reads", "writes"],
        ["input", "InputStage", "encoder", "seeds", "generator"],
        ["[odd]", "ForeignStage", "denoiser", "(undeclared)", "(undeclared)"],
        ["last", "LastStage", "decoder", "-", "-"],
    ]


def test_the_explanation_as_json(sglang):
    rows = json.loads(sglang("models", "explain", "SomePipeline", "--json").out)
    assert rows[0] == {
        "name": "input",
        "class_name": "InputStage",
        "role": "encoder",
        "reads": ["seeds"],
        "writes": ["generator"],
    }
    assert rows[1]["reads"] is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["explain"], "which one? Give a name that 'sglang models' lists."),
        (["explain", "Nothing"], "'Nothing' is no known pipeline."),
        (["explain", "a", "b"], "unexpected 'b'"),
        (["explian"], "unexpected 'explian'"),
        (["--jsn"], "unrecognized argument --jsn. Did you mean '--json'?"),
    ],
)
def test_a_mistake_is_one_paragraph(fails, argv, message):
    assert fails("models", *argv).startswith(message)


@pytest.mark.parametrize("argv", [["models", "-h"], ["models", "explain", "--help"]])
def test_help(sglang, argv):
    outcome = sglang(*argv)
    assert outcome.code == 0
    assert outcome.out.startswith("usage: sglang models")
