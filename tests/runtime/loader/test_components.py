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
from diffusers.schedulers.scheduling_flow_match_heun_discrete import (
    FlowMatchHeunDiscreteScheduler,
)
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from sglang.multimodal_gen.configs.pipeline_configs.base import ImagePipelineConfig
from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
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
)
from sglang.multimodal_gen.runtime.loader.denoiser_split import (
    check_denoisers,
    split_denoisers,
)
from sglang.multimodal_gen.runtime.loader.model_source import ModelSource
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.component_roles import ROLES, role_of
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
    assert roles <= set(LOADERS) <= set(ROLES)
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


def _weights(path: Path, width: int, value: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"weight": torch.full((width,), value)}, path)
    return path


def test_weights_from_a_file_win_over_the_folders(source: ModelSource, tmp_path: Path) -> None:
    file = _weights(tmp_path / "other/tuned.safetensors", SIZES["vae"], 3.0)
    loaded = _load(source, "vae", component_weights_paths={"vae": str(file)})["vae"]
    assert loaded.module.weight.tolist() == [3.0] * SIZES["vae"]
    assert loaded.receipt.files == (file,)
    assert _load(source, "vae")["vae"].module.weight.tolist() == [0.0] * SIZES["vae"]


def test_weights_come_from_a_folder_or_an_index_too(
    source: ModelSource, tmp_path: Path, write_shards: Any
) -> None:
    folder = write_shards(tmp_path / "o", {"x.safetensors": {"weight": torch.full((4,), 2.0)}})
    for path in (folder, folder / "model.safetensors.index.json"):
        loaded = _load(source, "vae", component_weights_paths={"vae": str(path)})
        assert loaded["vae"].module.weight.tolist() == [2.0] * 4


def test_weights_serve_a_folder_that_has_none_and_one_that_was_replaced(
    source: ModelSource, tmp_path: Path
) -> None:
    replaced = _write(tmp_path / "replaced", 6)
    (replaced / "model.safetensors").unlink()
    file = _weights(tmp_path / "w.safetensors", 6, 5.0)
    loaded = _load(
        source, "vae", component_paths={"vae": str(replaced)},
        component_weights_paths={"vae": str(file)},
    )  # fmt: skip
    assert loaded["vae"].module.weight.tolist() == [5.0] * 6


def test_weights_from_elsewhere_are_checked_strictly(source: ModelSource, tmp_path: Path) -> None:
    file = _weights(tmp_path / "w.safetensors", SIZES["vae"] + 1, 1.0)
    with pytest.raises(CheckpointError, match=r"Misshapen \(1\)") as caught:
        _load(source, "vae", component_weights_paths={"vae": str(file)})
    assert str(file) in str(caught.value)


def test_a_missing_weights_file_never_falls_back(source: ModelSource) -> None:
    with pytest.raises(InvalidArgument, match=r"component_weights_paths\.vae=.*no such file"):
        _load(source, "vae", component_weights_paths={"vae": "/nowhere.safetensors"})


def test_weights_are_for_exact_names_of_components(source: ModelSource, tmp_path: Path) -> None:
    file = _weights(tmp_path / "w.safetensors", SIZES["text_encoder_2"], 1.0)
    with pytest.raises(InvalidArgument, match="Did you mean 'text_encoder_2'"):
        _load(source, "text_encoder_2", component_weights_paths={"text_encoder_3": str(file)})
    loaded = _load(source, "text_encoder", "text_encoder_2",
                   component_weights_paths={"text_encoder_2": str(file)})  # fmt: skip
    assert loaded["text_encoder_2"].module.weight[0] == 1
    assert loaded["text_encoder"].module.weight[0] == 0


def test_a_component_without_weights_takes_none(source: ModelSource, tmp_path: Path) -> None:
    file = _weights(tmp_path / "w.safetensors", 1, 1.0)
    with pytest.raises(InvalidArgument, match="SchedulerLoader reads no weights"):
        _load(source, "scheduler", component_weights_paths={"scheduler": str(file)})


def test_an_alias_takes_its_own_loader_else_that_of_what_it_stands_for(
    source: ModelSource,
) -> None:
    aliases = {"denoiser": "transformer", "steps": "scheduler"}
    loaded = _load(source, "denoiser", "steps", aliases=aliases)
    assert isinstance(loaded["denoiser"].module, Block)
    assert isinstance(loaded["steps"].module, FlowMatchEulerDiscreteScheduler)


def test_a_component_that_the_index_does_not_name_says_its_class_itself(
    source: ModelSource, tmp_path: Path
) -> None:
    extra = _write(tmp_path / "extra", 3, 4.0)
    loaded = _load(source, "text_encoder_3", component_paths={"text_encoder_3": str(extra)})
    assert loaded["text_encoder_3"].module.weight.tolist() == [4.0] * 3


@pytest.fixture
def unindexed(source: ModelSource) -> ModelSource:
    index = {"_class_name": "TestPipeline"}
    return dataclasses.replace(source, model_index=index, indexed=False)


def test_without_an_index_a_component_is_the_folder_of_its_name(unindexed: ModelSource) -> None:
    loaded = _load(unindexed, "vae", "text_encoder", "scheduler")
    assert isinstance(loaded["text_encoder"].module, Block)
    assert isinstance(loaded["scheduler"].module, FlowMatchEulerDiscreteScheduler)


def test_without_an_index_a_missing_folder_is_named_with_the_remedy(
    unindexed: ModelSource,
) -> None:
    with pytest.raises(CheckpointError, match=r"'tokenizer' is missing.*--component-paths\.token"):
        _load(unindexed, "vae", "tokenizer")


@pytest.fixture
def one_file(tmp_path: Path, source: ModelSource) -> ModelSource:
    """A bare file with the weights of the transformer."""
    file = _weights(tmp_path / "bare/tuned.safetensors", SIZES["transformer"], 7.0)
    return dataclasses.replace(
        source,
        name=str(file),
        root=file.parent,
        model_index={"_class_name": "TestPipeline"},
        indexed=False,
        weights_files={"transformer": file},
    )


def test_one_file_needs_a_config_and_the_other_components(
    one_file: ModelSource, source: ModelSource
) -> None:
    said = r"needs vae, scheduler\..*--component-paths\.vae FOLDER --component-paths\.scheduler"
    with pytest.raises(InvalidArgument, match=said):
        _load(one_file, "transformer", "vae", "scheduler")
    names = {name: name for name in ("transformer", "vae", "scheduler")}
    with pytest.raises(InvalidArgument, match=said):
        read_component_configs(one_file, names, _args())
    vae = {"vae": str(source.root / "vae")}
    with pytest.raises(InvalidArgument, match=r"--component-paths\.transformer FOLDER"):
        _load(one_file, "transformer", "vae", component_paths=vae)
    both = vae | {"transformer": str(source.root / "transformer")}
    loaded = _load(one_file, "transformer", "vae", component_paths=both)
    assert loaded["transformer"].module.weight[0] == 7
    assert loaded["vae"].module.weight[0] == 0


def test_one_files_config_lies_beside_it_or_is_the_pipelines_default(
    one_file: ModelSource,
) -> None:
    config = {"_class_name": "Block", "width": SIZES["transformer"]}
    default = load_components(
        one_file, {"denoiser": "transformer"}, _args(), {}, None, {"denoiser": config}
    )
    assert default["denoiser"].module.weight[0] == 7
    (one_file.root / "config.json").write_text(json.dumps(config))
    assert _load(one_file, "transformer")["transformer"].module.weight[0] == 7


def test_the_users_weights_win_over_the_one_file(one_file: ModelSource, tmp_path: Path) -> None:
    file = _weights(tmp_path / "w.safetensors", SIZES["transformer"], 8.0)
    config = {"_class_name": "Block", "width": SIZES["transformer"]}
    (one_file.root / "config.json").write_text(json.dumps(config))
    loaded = _load(one_file, "transformer", component_weights_paths={"transformer": str(file)})
    assert loaded["transformer"].module.weight[0] == 8


def test_an_alias_of_a_denoiser_is_one_too(source: ModelSource) -> None:
    """On several ranks it would be held whole by each: refused, as it has no table."""
    parallel = dataclasses.replace(ParallelState.single(), tp=Group("tp", 0, (0, 1)))
    load_components(source, {"vae": "vae"}, _args(), {}, parallel=parallel)
    for name in ("denoiser", "transformer"):
        with pytest.raises(InvalidArgument, match="tp_size=2: Block has no TP_PLAN"):
            load_components(source, {name: "transformer"}, _args(), {}, parallel=parallel)


def test_a_replaced_component_is_of_its_own_folders_class(
    source: ModelSource, tmp_path: Path
) -> None:
    other = tmp_path / "heun"
    FlowMatchHeunDiscreteScheduler().save_pretrained(other)
    loaded = _load(source, "scheduler", component_paths={"scheduler": str(other)})
    assert isinstance(loaded["scheduler"].module, FlowMatchHeunDiscreteScheduler)
    index = {**source.model_index, "scheduler": ["my_package", "Euler"], "vae": ["my_package", "X"]}
    foreign = dataclasses.replace(source, model_index=index)
    loaded = _load(foreign, "scheduler", component_paths={"scheduler": str(other)})
    assert isinstance(loaded["scheduler"].module, FlowMatchHeunDiscreteScheduler)


def _clip(folder: Path, architecture: str) -> Path:
    """A CLIP text model, saved as one of Transformers' classes would be."""
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2,
                             "num_hidden_layers": 1, "vocab_size": 9}  # fmt: skip
    CLIPTextModel(CLIPTextConfig(**sizes)).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if architecture == "CLIPModel":
        config = {"model_type": "clip", "text_config": config}
    path.write_text(json.dumps(config | {"architectures": [architecture]}))
    return folder


@pytest.mark.parametrize(
    ("indexed", "saved_as"),
    [
        ("T5EncoderModel", "CLIPTextModel"),  # another model
        ("CLIPTextModel", "CLIPModel"),  # the text part of it, says the index
        ("CLIPTextModel", "CLIPTextModel"),
    ],
)
def test_a_replaced_encoder_is_the_part_that_the_index_means_if_it_has_it(
    source: ModelSource, tmp_path: Path, indexed: str, saved_as: str
) -> None:
    index = {**source.model_index, "text_encoder": ["transformers", indexed]}
    other = _clip(tmp_path / "clip", saved_as)
    loaded = _load(dataclasses.replace(source, model_index=index), "text_encoder",
                   component_paths={"text_encoder": str(other)})  # fmt: skip
    assert isinstance(loaded["text_encoder"].module, CLIPTextModel)


def test_an_alias_has_the_precision_of_what_it_stands_for(source: ModelSource) -> None:
    aliases = {"decoder": "vae", "words": "text_encoder", "more_words": "text_encoder_2"}
    loaded = _load(source, *aliases, config=CONFIG, precision="config", aliases=aliases)
    dtypes = [component.module.weight.dtype for component in loaded.values()]
    assert dtypes == [FP32, FP16, BF16]


def test_a_plain_module_follows_the_denoiser_whatever_its_name(source: ModelSource) -> None:
    loaded = _load(source, "vae", config=CONFIG, precision="config",
                   loaders={"vae": PlainStateDictComponentLoader})  # fmt: skip
    assert loaded["vae"].module.weight.dtype == BF16


@pytest.mark.parametrize("name", ["transformer_vace", "unet", "unet_2"])
def test_whatever_denoises_is_never_held_whole_by_every_rank(
    source: ModelSource, name: str
) -> None:
    index = {**source.model_index, name: ["diffusers", "Block"]}
    _write(source.root / name, 4)
    source = dataclasses.replace(source, model_index=index)
    two = Group("tp", 0, (0, 1))
    for loader in (NeuralComponentLoader, PlainStateDictComponentLoader):
        parallel = dataclasses.replace(ParallelState.single(), tp=two)
        with pytest.raises(InvalidArgument, match="tp_size=2: "):
            load_components(source, {name: name}, _args(), {name: loader}, parallel=parallel)
    names = {"transformer": "transformer", name: name}
    parallel = dataclasses.replace(ParallelState.single(), sp=two)
    with pytest.raises(InvalidArgument, match=rf"{name} \(Block\) has no SP_PLAN"):
        check_denoisers(source, {name: name}, _args(), {}, parallel)
    with pytest.raises(InvalidArgument, match=r"\(Block\) has no SP_PLAN"):
        split_denoisers({n: Block(4) for n in names}, names, parallel)
