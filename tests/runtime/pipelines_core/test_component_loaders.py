"""``component_loaders`` of a pipeline, and what the seed says of the plain state-dict loader."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    PlainStateDictComponentLoader,
)
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, PipelineDefinitionError

from seed_samples import my_model


class Query(nn.Module):
    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.dropout = nn.Dropout(0.5)
        self.weight = nn.Parameter(torch.zeros(width))


class SeedPipeline(ComposedPipelineBase):
    """The seed's sample of `component_loaders`, with an alias beside it."""

    pipeline_name = "SeedPipeline"
    _required_config_modules = ["transformer", "queryformer", "projection"]
    _extra_config_module_map = {"projection": "text_projection"}
    component_loaders = {
        "queryformer": PlainStateDictComponentLoader,
        "projection": PlainStateDictComponentLoader,
    }

    def create_pipeline_stages(self, server_args: ServerArgs) -> None:
        pass


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    ModelRegistry.get_supported_archs()
    monkeypatch.setattr(ModelRegistry, "_models", dict(ModelRegistry._models))
    ModelRegistry.register_model("QueryModel", Query)
    index: dict[str, Any] = {"_class_name": "SeedPipeline"}
    for value, name in enumerate(["transformer", "queryformer", "text_projection"]):
        config = {"_class_name": "QueryModel", "_diffusers_version": "0.1", "width": 4}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"scale": 0.5}))
        save_file({"weight": torch.full((4,), value + 1.0)}, tmp_path / name / "m.safetensors")
        index[name] = ["my_package", "QueryModel"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    return tmp_path


def build(root: Path, cls: type[ComposedPipelineBase] = SeedPipeline, **flat: Any) -> Any:
    config = dataclasses.replace(my_model.MyModelPipelineConfig(), dit_precision="fp16")
    args = ServerArgs.from_flat(device="cpu", pipeline_config=config, **flat)
    return cls(str(root), args)


def test_names_and_aliases_choose_their_loaders(root: Path) -> None:
    modules = build(root).modules
    assert list(modules) == ["transformer", "queryformer", "projection"]
    assert [module.weight[0].item() for module in modules.values()] == [1.0, 2.0, 3.0]


def test_non_metadata_fields_go_to_the_constructor_and_eval_mode_is_the_lifecycles(
    root: Path,
) -> None:
    query = build(root).get_module("queryformer")
    assert query.scale == 0.5
    assert not query.training
    assert not query.dropout.training
    assert not query.weight.requires_grad


def test_the_precision_is_the_dit_precision_unless_named(root: Path) -> None:
    modules = build(root, precision="config").modules
    assert {module.weight.dtype for module in modules.values()} == {torch.float16}
    chosen = {"queryformer": "bf16", "projection": "fp32"}
    modules = build(root, precision="config", component_precisions=chosen).modules
    assert [module.weight.dtype for module in modules.values()] == [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]


def test_weights_from_elsewhere_go_by_the_exact_name(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "tuned.safetensors"
    save_file({"weight": torch.full((4,), 9.0)}, file)
    modules = build(root, component_weights_paths={"projection": str(file)}).modules
    assert [module.weight[0].item() for module in modules.values()] == [1.0, 2.0, 9.0]


def test_the_class_is_config_jsons_then_the_indexs(root: Path) -> None:
    config = root / "queryformer/config.json"
    config.write_text(json.dumps({"width": 4}))
    assert isinstance(build(root).get_module("queryformer"), Query)
    config.write_text(json.dumps({"width": 4, "_class_name": "Nothing"}))
    with pytest.raises(CheckpointError, match="Unsupported model architecture: Nothing"):
        build(root)


def test_a_chosen_loader_never_falls_back(root: Path) -> None:
    """The default loader would find this class in Diffusers; the chosen one must not look."""
    (root / "queryformer/config.json").write_text(json.dumps({"_class_name": "AutoencoderTiny"}))
    with pytest.raises(CheckpointError, match="Unsupported model architecture: AutoencoderTiny"):
        build(root)


def test_the_choice_is_this_pipelines_and_registering_alone_chooses_nothing(root: Path) -> None:
    class Without(SeedPipeline):
        component_loaders = {}

    with pytest.raises(PipelineDefinitionError, match="'queryformer' has no default loader"):
        build(root, Without)


def test_a_loader_for_no_component_is_refused(root: Path) -> None:
    class Misspelt(SeedPipeline):
        component_loaders = {
            **SeedPipeline.component_loaders,
            "querformer": PlainStateDictComponentLoader,
        }

    with pytest.raises(PipelineDefinitionError, match="Did you mean 'queryformer'"):
        build(root, Misspelt)


def test_a_quantised_component_is_refused(root: Path) -> None:
    config = {"_class_name": "QueryModel", "width": 4, "quantization_config": {"bits": 4}}
    (root / "text_projection/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"'projection': .* is quantised"):
        build(root)
