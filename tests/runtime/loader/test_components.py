from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from safetensors.torch import save_file
from torch import nn

from sglang.multimodal_gen.configs.pipeline_configs.base import ImagePipelineConfig
from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    ComponentLoader,
    ComponentSpec,
    LoadedComponent,
    NeuralComponentLoader,
    PlainStateDictComponentLoader,
)
from sglang.multimodal_gen.runtime.loader.component_loaders.text_encoder_loader import (
    TextEncoderLoader,
)
from sglang.multimodal_gen.runtime.loader.components import (
    LOADERS,
    load_components,
    read_component_configs,
    role_of,
)
from sglang.multimodal_gen.runtime.loader.model_source import ModelSource
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import (
    CheckpointError,
    InvalidArgument,
    PipelineDefinitionError,
)
from sglang.multimodal_gen.runtime.utils.progress import ProgressEvent

SIZES = {"transformer": 32, "text_encoder": 8, "text_encoder_2": 16, "vae": 4}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSource:
    """A checkpoint of four tiny modules and a scheduler."""
    ModelRegistry.get_supported_archs()
    monkeypatch.setattr(ModelRegistry, "_models", dict(ModelRegistry._models))
    ModelRegistry.register_model("Block", Block)
    root = tmp_path / "model"
    for name, width in SIZES.items():
        _write(root / name, width)
    FlowMatchEulerDiscreteScheduler().save_pretrained(root / "scheduler")
    index: dict[str, Any] = {name: ["diffusers", "Block"] for name in SIZES}
    index |= {
        "_class_name": "TestPipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "image_encoder": [None, None],
    }
    return ModelSource(name="model", root=root, model_index=index, kind="local")


def _write(folder: Path, width: int, value: float = 0.0) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"_class_name": "Block", "width": width}))
    save_file({"weight": torch.full((width,), value)}, folder / "model.safetensors")
    return folder


def _args(config: ImagePipelineConfig | None = None, **model: Any) -> ServerArgs:
    args = ServerArgs()
    return dataclasses.replace(
        args,
        model=dataclasses.replace(args.model, **model),
        platform=dataclasses.replace(args.platform, device="cpu"),
        pipeline_config=config,
    )


def _load(
    source: ModelSource,
    *names: str,
    loaders: Mapping[str, type[ComponentLoader]] | None = None,
    progress: Any = None,
    aliases: Mapping[str, str] | None = None,
    **model: Any,
) -> dict[str, LoadedComponent]:
    keys = {name: (aliases or {}).get(name, name) for name in names}
    config = model.pop("config", None)
    return load_components(source, keys, _args(config, **model), loaders or {}, progress)


@pytest.mark.parametrize(
    ("component", "role"),
    [
        ("transformer", "transformer"),
        ("transformer_2", "transformer"),
        ("text_encoder_2", "text_encoder"),
        ("tokenizer_13", "tokenizer"),
        ("vae_x", "vae_x"),
        ("2", "2"),
        ("_2", "_2"),
    ],
)
def test_roles_are_names_without_their_number(component: str, role: str) -> None:
    assert role_of(component) == role


def test_every_role_of_the_spine_has_a_loader() -> None:
    roles = {"transformer", "text_encoder", "image_encoder", "vae", "scheduler", "tokenizer"}
    assert roles <= set(LOADERS)
    assert LOADERS["text_encoder"] is TextEncoderLoader


def test_components_come_back_in_the_pipelines_order(source: ModelSource) -> None:
    names = ("vae", "transformer", "scheduler", "text_encoder_2")
    loaded = _load(source, *names)
    assert tuple(loaded) == names
    assert isinstance(loaded["transformer"].module, Block)
    assert isinstance(loaded["scheduler"].module, FlowMatchEulerDiscreteScheduler)
    assert loaded["scheduler"].receipt is None


def test_an_alias_leads_to_another_folder(source: ModelSource) -> None:
    loaded = _load(source, "denoiser", aliases={"denoiser": "transformer"},
                   loaders={"denoiser": PlainStateDictComponentLoader})  # fmt: skip
    assert loaded["denoiser"].module.weight.shape == (SIZES["transformer"],)


def test_small_faults_show_first_then_the_largest_load_first(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    original = ComponentLoader.load

    def load(self: ComponentLoader, spec: ComponentSpec, progress: Any = None) -> LoadedComponent:
        order.append(spec.name)
        return original(self, spec, progress)

    monkeypatch.setattr(ComponentLoader, "load", load)
    _load(source, "vae", "text_encoder", "text_encoder_2", "transformer", "scheduler")
    assert order == ["scheduler", "transformer", "text_encoder_2", "text_encoder", "vae"]


def test_progress_rises_to_the_sum_of_all(source: ModelSource) -> None:
    events: list[ProgressEvent] = []
    _load(source, *SIZES, "scheduler", progress=events.append)
    total = 4 * sum(SIZES.values())
    assert {event.total for event in events} == {total}
    assert {event.label for event in events} == set(SIZES)
    done = [event.done for event in events]
    assert done == sorted(done)
    assert done[-1] == total


@pytest.mark.parametrize("fault", ["folder", "weights", "shard", "truncated"])
def test_a_fault_of_a_small_component_is_found_before_a_large_one_is_loaded(
    source: ModelSource, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = source.root / "vae/model.safetensors"
    if fault == "folder":
        (source.root / "vae").rename(source.root / "away")
    elif fault == "weights":
        weights.unlink()
    elif fault == "shard":
        index = {"weight_map": {"weight": "model-00001-of-00002.safetensors"}}
        (source.root / "vae/model.safetensors.index.json").write_text(json.dumps(index))
    else:
        weights.write_bytes(weights.read_bytes()[:-1])
    monkeypatch.setattr(ComponentLoader, "load", None)
    with pytest.raises(CheckpointError, match="vae"):
        _load(source, "transformer", "vae")


def test_a_missing_folder_offers_the_remedy(source: ModelSource) -> None:
    (source.root / "vae").rename(source.root / "away")
    with pytest.raises(CheckpointError, match=r"'vae' is missing: .*--component-paths\.vae"):
        _load(source, "vae")


@pytest.mark.parametrize("name", ["image_encoder", "tokenizer"])
def test_a_component_that_the_index_lacks_is_named(source: ModelSource, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"no component '{name}'.*it has transformer, "):
        _load(source, "vae", name)


def test_an_unknown_role_is_the_porters_fault(source: ModelSource) -> None:
    with pytest.raises(
        PipelineDefinitionError, match=r"'text_encodr' has no default loader\. Did you"
    ):
        _load(source, "text_encodr")


def test_a_chosen_loader_is_used_for_its_name_alone(source: ModelSource) -> None:
    class Chosen(ComponentLoader):
        def load_module(self, spec: ComponentSpec, progress: Any) -> tuple[Any, None]:
            return "chosen", None

    loaded = _load(source, "text_encoder", "text_encoder_2", loaders={"text_encoder_2": Chosen})
    assert loaded["text_encoder_2"].module == "chosen"
    assert isinstance(loaded["text_encoder"].module, Block)


def test_a_chosen_loader_that_fails_is_not_replaced(source: ModelSource) -> None:
    """CB-117: the default loader could load it, and must not."""

    class Failing(NeuralComponentLoader):
        def model_class(self, spec: ComponentSpec) -> type:
            raise CheckpointError("the cause")

    assert _load(source, "vae")
    with pytest.raises(CheckpointError, match="the cause"):
        _load(source, "vae", loaders={"vae": Failing})


def test_a_component_is_taken_from_another_folder(source: ModelSource, tmp_path: Path) -> None:
    other = _write(tmp_path / "other", 6, value=3.0)
    loaded = _load(source, "vae", "transformer", component_paths={"vae": str(other)})
    assert torch.equal(loaded["vae"].module.weight, torch.full((6,), 3.0))
    configs = read_component_configs(
        source,
        {"vae": "vae", "transformer": "transformer", "scheduler": "scheduler"},
        _args(component_paths={"vae": str(other)}),
    )
    assert {name: config["width"] for name, config in configs.items()} == {
        "vae": 6,
        "transformer": SIZES["transformer"],
    }


def test_another_folder_serves_a_component_that_the_index_lacks(
    source: ModelSource, tmp_path: Path
) -> None:
    other = _write(tmp_path / "other", 6)
    loaded = _load(source, "image_encoder", component_paths={"image_encoder": str(other)},
                   loaders={"image_encoder": PlainStateDictComponentLoader})  # fmt: skip
    assert isinstance(loaded["image_encoder"].module, Block)


def test_another_folder_that_is_none_is_the_callers_fault(source: ModelSource) -> None:
    with pytest.raises(InvalidArgument, match=r"component_paths\.vae='/nowhere': no such folder"):
        _load(source, "vae", component_paths={"vae": "/nowhere"})


@pytest.mark.parametrize("field", ["component_paths", "component_precisions"])
def test_an_argument_for_no_component_is_refused(source: ModelSource, field: str) -> None:
    arguments: dict[str, Any] = {field: {"transfomer": "bf16"}}
    with pytest.raises(InvalidArgument, match=rf"{field}\.transfomer=.*Did you mean 'transformer'"):
        _load(source, "transformer", loaders={}, **arguments)


def test_a_precision_for_what_has_no_weights_is_refused(source: ModelSource) -> None:
    with pytest.raises(InvalidArgument, match=r"component_precisions\.scheduler=.*no weights"):
        _load(source, "scheduler", component_precisions={"scheduler": "bf16"})


CONFIG = ImagePipelineConfig(
    dit_precision="bf16", vae_precision="fp32", text_encoder_precisions=("fp16", "bf16")
)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EVERY = ("transformer", "vae", "text_encoder", "text_encoder_2")


@pytest.mark.parametrize(
    ("precision", "config", "dtypes"),
    [
        ("config", CONFIG, (BF16, FP32, FP16, BF16)),
        ("auto", CONFIG, (BF16, FP32, FP16, BF16)),
        ("fp16", CONFIG, (FP16, FP16, FP16, FP16)),
        ("config", None, (FP32, FP32, FP32, FP32)),
        ("bf16", None, (BF16, BF16, BF16, BF16)),
    ],
)
def test_precisions_come_from_the_flag_else_the_familys_config(
    source: ModelSource,
    precision: str,
    config: ImagePipelineConfig | None,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    loaded = _load(source, *EVERY, config=config, precision=precision)
    assert tuple(loaded[name].module.weight.dtype for name in EVERY) == dtypes


def test_a_components_own_precision_wins(source: ModelSource) -> None:
    loaded = _load(
        source,
        *EVERY,
        config=CONFIG,
        precision="fp32",
        component_precisions={"vae": "bf16", "text_encoder_2": "fp16"},
    )
    dtypes = [loaded[name].module.weight.dtype for name in EVERY]
    assert dtypes == [FP32, BF16, FP32, FP16]


def test_one_precision_serves_all_text_encoders(source: ModelSource) -> None:
    config = ImagePipelineConfig(text_encoder_precisions=("fp16",))
    loaded = _load(source, *EVERY, config=config, precision="config")
    assert loaded["text_encoder_2"].module.weight.dtype == FP16


def test_an_auxiliary_module_follows_the_transformer(source: ModelSource) -> None:
    loaded = _load(source, "queryformer", config=CONFIG, precision="config",
                   aliases={"queryformer": "text_encoder"},
                   loaders={"queryformer": PlainStateDictComponentLoader})  # fmt: skip
    assert loaded["queryformer"].module.weight.dtype == BF16
