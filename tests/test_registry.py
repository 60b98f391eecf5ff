"""A model is found: by path, id, pipeline's name, or because the user says what it is."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import save_file

from sglang.multimodal_gen.configs.models import DiTConfig
from sglang.multimodal_gen.configs.task_type import ModelTaskType
from sglang.multimodal_gen.registry import Registry
from sglang.multimodal_gen.runtime.server_args.sections import ModelArgs
from sglang.multimodal_gen.runtime.utils.errors import (
    InvalidArgument,
    ModelNotFound,
    PipelineDefinitionError,
)

from seed_samples import my_model

ID = "my-org/custom-diffusion-model"


class CustomPipeline(my_model.MyModelPipeline):
    pipeline_name = "CustomPipeline"


class OtherPipeline(my_model.MyModelPipeline):
    pipeline_name = "OtherPipeline"
    _required_config_modules = ["denoiser", "vae"]
    _extra_config_module_map = {"denoiser": "transformer"}


@dataclass
class CustomConfig(my_model.MyModelPipelineConfig):
    pass


@dataclass
class OtherConfig(my_model.MyModelPipelineConfig):
    dit_config: DiTConfig = field(default_factory=DiTConfig)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Two pipelines of another package, and no family of this one."""
    (tmp_path / "empty_package").mkdir()
    (tmp_path / "empty_package/__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    own = Registry(pipeline_package="empty_package", config_package="empty_package")
    register(own, CustomPipeline, CustomConfig, hf_model_paths=[ID])
    register(own, OtherPipeline, OtherConfig, hf_model_paths=["my-org/other"])
    return own


def register(registry: Registry, pipeline: Any, config: Any, **options: Any) -> None:
    registry.register_pipeline(
        pipeline,
        sampling_param_cls=my_model.MyModelSamplingParams,
        pipeline_config_cls=config,
        **options,
    )


def folder(path: Path, class_name: str | None = None) -> Path:
    """A checkpoint, with a model index if a pipeline is given."""
    (path / "transformer").mkdir(parents=True)
    if class_name is not None:
        (path / "model_index.json").write_text(json.dumps({"_class_name": class_name}))
    return path


def find(registry: Registry, path: object, **model: Any) -> str:
    """The name of the pipeline that serves a path."""
    _, info = registry.find(ModelArgs(model_path=str(path), **model))
    return info.pipeline_cls.pipeline_name


def test_a_registered_id_without_a_model_index_is_a_folder_of_components(
    registry: Registry, tmp_path: Path
) -> None:
    path = folder(tmp_path / "custom-diffusion-model")
    source, info = registry.find(ModelArgs(model_path=str(path)))
    assert info.pipeline_cls is CustomPipeline
    assert info.pipeline_config_cls is CustomConfig
    assert (source.root, source.class_name, source.indexed) == (path, "CustomPipeline", False)
    assert source.components == {}


def test_a_registered_folder_without_a_model_index(registry: Registry, tmp_path: Path) -> None:
    path = folder(tmp_path / "a" / "b")
    register(
        registry, type("P", (CustomPipeline,), {"pipeline_name": "P"}), CustomConfig,
        hf_model_paths=[str(path) + "/"],
    )  # fmt: skip
    assert find(registry, path) == "P"
    assert find(registry, f"{path}/") == "P"


def test_a_hub_snapshot_folder_of_a_registered_id(registry: Registry, tmp_path: Path) -> None:
    path = folder(tmp_path / "models--my-org--custom-diffusion-model/snapshots/4d7a")
    assert find(registry, path) == "CustomPipeline"


def test_an_unregistered_folder_without_a_model_index_is_refused(
    registry: Registry, tmp_path: Path
) -> None:
    path = folder(tmp_path / "x")
    with pytest.raises(ModelNotFound, match=r"has no model_index\.json"):
        find(registry, path)
    assert find(registry, path, pipeline_class_name="OtherPipeline") == "OtherPipeline"
    assert find(registry, path, model_id="my-org/other") == "OtherPipeline"


def test_a_registered_name_on_a_folder_of_something_else_keeps_the_folders_hint(
    registry: Registry, tmp_path: Path
) -> None:
    path = tmp_path / "custom-diffusion-model"
    folder(path / "inner", "CustomPipeline")
    with pytest.raises(ModelNotFound, match="Give the folder inside it instead"):
        find(registry, path)


def test_a_hub_id_without_a_model_index(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "snapshots" / ("4d7a" * 10)
    asked: list[tuple[str | None, list[str]]] = []

    def no_index(repo_id: str, filename: str, revision: str | None) -> str:
        raise EntryNotFoundError("no such file")

    def download(repo_id: str, revision: str | None, allow_patterns: list[str], **_: Any) -> str:
        asked.append((revision, allow_patterns))
        folder(snapshot) if not snapshot.exists() else None
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_index)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source, info = registry.find(ModelArgs(model_path=ID, revision="v1"))
    assert (source.kind, source.root, source.indexed) == ("hub", snapshot, False)
    assert info.pipeline_cls is CustomPipeline
    assert [revision for revision, _ in asked] == ["v1", snapshot.name]
    assert {"transformer/*.safetensors", "tokenizer/*.json", "vae/*.json"} <= set(asked[1][1])
    with pytest.raises(ModelNotFound, match=r"has no model_index\.json"):
        registry.find(ModelArgs(model_path="my-org/unregistered"))


def test_the_class_name_selects_a_pipeline_that_registered_no_id_and_no_detector(
    registry: Registry, tmp_path: Path
) -> None:
    assert find(registry, folder(tmp_path / "x", "OtherPipeline")) == "OtherPipeline"


def test_an_id_wins_over_the_class_name(registry: Registry, tmp_path: Path) -> None:
    path = folder(tmp_path / "custom-diffusion-model", "OtherPipeline")
    _, info = registry.find(ModelArgs(model_path=str(path)))
    assert info.pipeline_config_cls is CustomConfig


def test_variants_of_one_pipeline_are_told_apart_by_their_detectors(
    registry: Registry, tmp_path: Path
) -> None:
    class Fast(CustomConfig):
        pass

    registry._family_pipelines = ("CustomPipeline",)
    registry.register_configs(
        my_model.MyModelSamplingParams, Fast, model_detectors=[lambda value: "fast" in value]
    )
    fast = folder(tmp_path / "a-fast-one", "CustomPipeline")
    assert registry.find(ModelArgs(model_path=str(fast)))[1].pipeline_config_cls is Fast


def test_two_variants_that_fit_equally_well_are_named_with_the_remedy(
    registry: Registry, tmp_path: Path
) -> None:
    class Twin(CustomConfig):
        pass

    for config, path in ((CustomConfig, "o/a"), (Twin, "o/b")):
        registry._family_pipelines = ("CustomPipeline",)
        registry.register_configs(my_model.MyModelSamplingParams, config, hf_model_paths=[path])
    path = folder(tmp_path / "x", "CustomPipeline")
    said = r"CustomConfig \(my-org/.*\) and CustomConfig \(o/a\) and Twin \(o/b\); .*--model-id"
    with pytest.raises(ModelNotFound, match=said):
        find(registry, path)
    _, info = registry.find(ModelArgs(model_path=str(path), model_id="o/b"))
    assert info.pipeline_config_cls is Twin


def test_the_pipeline_is_forced(registry: Registry, tmp_path: Path) -> None:
    path = folder(tmp_path / "custom-diffusion-model", "CustomPipeline")
    _, info = registry.find(ModelArgs(model_path=str(path), pipeline_class_name="OtherPipeline"))
    assert (info.pipeline_cls, info.pipeline_config_cls) == (OtherPipeline, OtherConfig)


def test_a_misspelt_pipeline_is_refused_before_the_model_is_looked_for(registry: Registry) -> None:
    with pytest.raises(ModelNotFound, match="Did you mean 'OtherPipeline'"):
        find(registry, "/nowhere", pipeline_class_name="OtherPipelin")


def test_a_pipeline_without_settings_is_refused(registry: Registry, tmp_path: Path) -> None:
    registry._pipelines["Bare"] = CustomPipeline
    with pytest.raises(ModelNotFound, match="no settings were registered with it"):
        find(registry, folder(tmp_path / "x", "Bare"), pipeline_class_name="Bare")


@pytest.mark.parametrize("model_id", ["my-org/other", "MY-ORG/Other", "other", "elsewhere/other"])
def test_the_model_id_overrides_detection(
    registry: Registry, tmp_path: Path, model_id: str
) -> None:
    path = folder(tmp_path / "custom-diffusion-model", "Unknown")
    assert find(registry, path, model_id=model_id) == "OtherPipeline"


def test_an_unknown_model_id_is_refused(registry: Registry, tmp_path: Path) -> None:
    path = folder(tmp_path / "x", "CustomPipeline")
    with pytest.raises(InvalidArgument, match=f"model_id=.*Did you mean '{ID}'"):
        find(registry, path, model_id="my-org/custom-difusion-model")


def test_no_match_names_what_is_near_and_what_can_be_said(
    registry: Registry, tmp_path: Path
) -> None:
    with pytest.raises(ModelNotFound, match=r"Did you mean 'CustomPipeline'.*--pipeline NAME"):
        find(registry, folder(tmp_path / "x", "CustomPipelin"))
    with pytest.raises(ModelNotFound, match="Did you mean 'custom-diffusion-model'"):
        find(registry, folder(tmp_path / "custom-diffusion-modl", "Q"))


def test_one_file_is_the_denoisers_weights(registry: Registry, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({"weight": torch.zeros(2)}, file)
    with pytest.raises(ModelNotFound, match=r"With --pipeline NAME .* --component-paths"):
        find(registry, file)
    for pipeline in ("CustomPipeline", "OtherPipeline"):
        source, _ = registry.find(ModelArgs(model_path=str(file), pipeline_class_name=pipeline))
        assert source.weights_files == {"transformer": file}
        assert source.class_name == pipeline


def test_another_kind_of_file_is_refused_with_a_pipeline_too(
    registry: Registry, tmp_path: Path
) -> None:
    (tmp_path / "weights.ckpt").touch()
    with pytest.raises(ModelNotFound, match="Pickle checkpoints are refused"):
        find(registry, tmp_path / "weights.ckpt", pipeline_class_name="CustomPipeline")


def test_variants_without_an_id_are_told_apart_by_their_pipelines(
    registry: Registry, tmp_path: Path
) -> None:
    for pipeline in ("CustomPipeline", "OtherPipeline"):
        registry._family_pipelines = (pipeline,)
        registry.register_configs(
            my_model.MyModelSamplingParams, CustomConfig, model_detectors=[lambda v: "odd" in v]
        )
    said = r"CustomConfig \(CustomPipeline\) and CustomConfig \(OtherPipeline\)"
    with pytest.raises(ModelNotFound, match=said):
        find(registry, folder(tmp_path / "an-odd-one", "Unknown"))


class Mine(CustomPipeline):
    """Another package's pipeline under the same name."""


@dataclass
class MyConfig(CustomConfig):
    pass


@pytest.mark.parametrize("name", ["custom-diffusion-model", "x"])
def test_a_replaced_pipeline_brings_its_own_settings(
    registry: Registry, tmp_path: Path, name: str
) -> None:
    register(registry, Mine, MyConfig, overwrite=True)
    for class_name in ("CustomPipeline", None) if name != "x" else ("CustomPipeline",):
        path = folder(tmp_path / str(class_name) / name, class_name)
        _, info = registry.find(ModelArgs(model_path=str(path)))
        assert (info.pipeline_cls, info.pipeline_config_cls) == (Mine, MyConfig)
    path = folder(tmp_path / "b" / name, "CustomPipeline")
    _, info = registry.find(ModelArgs(model_path=str(path), model_id=ID))
    assert info.pipeline_config_cls is MyConfig
    assert [k.pipelines for k in registry.known_models()].count(("CustomPipeline",)) == 1


def test_a_replaced_pipeline_leaves_its_familys_others_alone(
    registry: Registry, tmp_path: Path
) -> None:
    registry._family_pipelines = ("One", "Two")
    registry._pipelines |= {"One": CustomPipeline, "Two": OtherPipeline}
    registry.register_configs(
        my_model.MyModelSamplingParams, CustomConfig, hf_model_paths=["org/family"]
    )
    one = type("One", (Mine,), {"pipeline_name": "One"})
    register(registry, one, MyConfig, overwrite=True)
    found = {}
    for class_name in ("One", "Two"):
        for name in ("family", "another"):
            path = folder(tmp_path / class_name / name, class_name)
            _, info = registry.find(ModelArgs(model_path=str(path)))
            found[class_name, name] = info.pipeline_cls, info.pipeline_config_cls
    assert set(found.values()) == {(one, MyConfig), (OtherPipeline, CustomConfig)}
    assert found["One", "family"] == found["One", "another"] == (one, MyConfig)


def test_two_files_of_the_tree_cannot_have_one_pipeline_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "twice").mkdir()
    for name in ("__init__", "a", "b"):
        text = "from test_registry import CustomPipeline as EntryClass\n" if name in "ab" else ""
        (tmp_path / f"twice/{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "test_registry", sys.modules[__name__])
    registry = Registry(pipeline_package="twice", config_package="twice")
    with pytest.raises(PipelineDefinitionError, match=r"'CustomPipeline' .*twice\.a.*twice\.b"):
        registry.known_models()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"pipeline_class_name": "CustomPipeline"}, "pipeline_class_name='CustomPipeline'"),
        ({"model_id": ID}, f"model_id='{ID}'"),
    ],
)
def test_the_diffusers_backend_takes_its_pipeline_from_the_checkpoint(
    registry: Registry, model: dict[str, str], said: str
) -> None:
    with pytest.raises(InvalidArgument, match=rf"{said}: .*--backend diffusers"):
        find(registry, "/nowhere", backend="diffusers", **model)


def test_a_model_id_never_ends_at_the_diffusers_backend(registry: Registry, tmp_path: Path) -> None:
    registry._family_pipelines = ("CustomPipeline", "OtherPipeline")
    registry.register_configs(
        my_model.MyModelSamplingParams, CustomConfig, hf_model_paths=["org/several"]
    )
    path = folder(tmp_path / "x", "StableDiffusionPipeline")
    with pytest.raises(ModelNotFound, match="CustomPipeline, OtherPipeline"):
        find(registry, path, model_id="org/several")


def test_half_an_id_suggests_the_whole_one(registry: Registry) -> None:
    for given in ("custom-diffusion-model", "Custom-Diffusion-Modl"):
        with pytest.raises(ModelNotFound, match=rf"Did you mean '{ID}'\?.*--backend diffusers"):
            find(registry, given)
    with pytest.raises(ModelNotFound, match="organisation too") as caught:
        find(registry, "nothing-like-it")
    assert "Did you mean" not in str(caught.value)


def test_an_id_and_a_pipeline_that_contradict_are_refused_with_both_names(
    registry: Registry, tmp_path: Path
) -> None:
    path = folder(tmp_path / "x", "CustomPipeline")
    with pytest.raises(InvalidArgument, match=r"model_id='my-org/other'.*Other.*CustomPipeline"):
        find(registry, path, model_id="my-org/other", pipeline_class_name="CustomPipeline")
    both = {"model_id": ID, "pipeline_class_name": "CustomPipeline"}
    assert find(registry, path, **both) == "CustomPipeline"


T2I, I2I = ModelTaskType.T2I, ModelTaskType.I2I


@pytest.mark.parametrize(
    ("default", "tasks", "problem"),
    [
        (T2I, (), "must be nonempty"),
        (T2I, (T2I, T2I), "unique"),
        (I2I, (T2I,), "include the default task_type I2I"),
        (T2I, ("T2I",), "must be members of ModelTaskType, not 'T2I'"),
        ("T2I", (T2I,), "must be members of ModelTaskType, not 'T2I'"),
        (T2I, "T2I", "must be members"),
        (T2I, 5, "must be members"),
    ],
)
def test_unsound_tasks_are_refused_where_they_are_registered(
    registry: Registry, default: Any, tasks: Any, problem: str
) -> None:
    before = len(registry.known_models())

    class UnsoundConfig(my_model.MyModelPipelineConfig):
        task_type = default
        supported_task_types = tasks

        def __init__(self) -> None:
            pass

    class UnsoundPipeline(my_model.MyModelPipeline):
        pipeline_name = "UnsoundPipeline"

    with pytest.raises(PipelineDefinitionError, match=rf"UnsoundConfig.*{problem}"):
        register(registry, UnsoundPipeline, UnsoundConfig)
    with pytest.raises(PipelineDefinitionError, match=rf"UnsoundConfig.*{problem}"):
        registry.register_configs(my_model.MyModelSamplingParams, UnsoundConfig)
    assert len(registry.known_models()) == before


@pytest.mark.parametrize(
    ("detectors", "problem"),
    [
        ([lambda: True], "must take one argument"),
        ([lambda a, b: True], "must take one argument"),
        (["fox"], "is no function"),
        (lambda value: True, "must be a list of functions"),
        ([lambda value: value.path], "fails on a text: AttributeError"),
    ],
)
def test_unsound_detectors_are_refused_where_they_are_registered(
    registry: Registry, detectors: Any, problem: str
) -> None:
    class FoxPipeline(my_model.MyModelPipeline):
        pipeline_name = "FoxPipeline"

    with pytest.raises(PipelineDefinitionError, match=f"CustomConfig.*{problem}|{problem}"):
        register(registry, FoxPipeline, CustomConfig, model_detectors=detectors)
    register(registry, FoxPipeline, CustomConfig, model_detectors=[lambda value: "fox" in value])


def test_ids_are_a_list(registry: Registry) -> None:
    with pytest.raises(PipelineDefinitionError, match="must be a list of ids"):
        registry.register_configs(
            my_model.MyModelSamplingParams, CustomConfig, hf_model_paths="my-org/x"
        )
