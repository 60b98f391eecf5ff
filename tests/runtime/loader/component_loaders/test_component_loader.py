from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.modeling_utils import ModelMixin
from safetensors.torch import save_file
from torch import nn

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.layers.tensor_parallel import Column
from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    ComponentLoader,
    ComponentSpec,
    LoadedComponent,
    NeuralComponentLoader,
    PlainStateDictComponentLoader,
)
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
from sglang.multimodal_gen.runtime.models.vaes.parallel_tiled_vae import ParallelTiledVAE
from sglang.multimodal_gen.runtime.utils.errors import (
    CheckpointError,
    InvalidArgument,
    PipelineDefinitionError,
)


class QueryFormer(nn.Module):
    """An auxiliary module as a porter writes one."""

    def __init__(self, width: int, depth: int = 1) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"width={width} must be even")
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.register_buffer("scale", torch.full((width,), width**-0.5), persistent=False)


class SharedName(nn.Module):
    """Registered under the name of a Diffusers class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    ModelRegistry.get_supported_archs()
    monkeypatch.setattr(ModelRegistry, "_models", dict(ModelRegistry._models))
    ModelRegistry.register_model("QueryFormerModel", QueryFormer)


def _write(folder: Path, config: dict[str, Any], width: int = 4, depth: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    save_file(QueryFormer(width, depth).state_dict(), folder / "model.safetensors")
    return folder


def _spec(folder: Path, **changes: Any) -> ComponentSpec:
    fields = {
        "name": "queryformer",
        "path": folder,
        "library": "diffusers",
        "architecture": None,
        "precision": "fp32",
        "device": "cpu",
    }
    return ComponentSpec(**(fields | changes))


def _plain(folder: Path, **changes: Any) -> LoadedComponent:
    return PlainStateDictComponentLoader().load(_spec(folder, **changes))


CONFIG = {"_class_name": "QueryFormerModel", "_diffusers_version": "0.30", "width": 4, "depth": 2}


def test_a_plain_module_is_loaded(tmp_path: Path) -> None:
    loaded = _plain(_write(tmp_path, CONFIG, depth=2))
    assert isinstance(loaded.module, QueryFormer)
    torch.manual_seed(0)
    wanted = QueryFormer(4, 2)
    for name, value in wanted.state_dict().items():
        assert torch.equal(loaded.module.state_dict()[name], value)
    assert torch.equal(loaded.module.get_buffer("scale"), wanted.get_buffer("scale"))
    assert loaded.receipt is not None
    assert loaded.receipt.component == "queryformer"
    assert loaded.seconds > 0


def test_the_configs_class_wins_over_the_indexs(tmp_path: Path) -> None:
    loaded = _plain(_write(tmp_path, CONFIG, depth=2), architecture="AutoencoderKL")
    assert isinstance(loaded.module, QueryFormer)


def test_the_indexs_class_serves_a_config_without_one(tmp_path: Path) -> None:
    _write(tmp_path, {"width": 4})
    assert isinstance(_plain(tmp_path, architecture="QueryFormerModel").module, QueryFormer)


def test_a_component_without_any_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="names its class"):
        _plain(_write(tmp_path, {"width": 4}))


def test_a_plain_loader_does_not_search_the_libraries(tmp_path: Path) -> None:
    _write(tmp_path, {"_class_name": "AutoencoderTiny"})
    with pytest.raises(CheckpointError, match="Unsupported model architecture: AutoencoderTiny"):
        _plain(tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (CONFIG | {"heads": 3}, "unexpected keyword argument 'heads'"),
        ({"_class_name": "QueryFormerModel"}, "missing 1 required .*'width'"),
        (CONFIG | {"width": 5}, "width=5 must be even"),
        (CONFIG | {"width": "4"}, "not all arguments converted|not supported|does not fit"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        _plain(_write(tmp_path, config))
    assert "'queryformer'" in str(caught.value)
    assert "config.json does not fit QueryFormer" in str(caught.value)


def test_keys_and_shapes_are_strict(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"do not match 'queryformer'.*Missing \(2\)"):
        _plain(_write(tmp_path, CONFIG, depth=1))
    with pytest.raises(CheckpointError, match=r"Unexpected \(2\)"):
        _plain(_write(tmp_path, CONFIG, depth=3))
    with pytest.raises(CheckpointError, match=r"Misshapen \(4\)"):
        _plain(_write(tmp_path, CONFIG, width=6, depth=2))


def test_the_precision_is_honoured_by_parameters_and_computed_buffers(tmp_path: Path) -> None:
    module = _plain(_write(tmp_path, CONFIG, depth=2), precision="bf16").module
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    assert module.scale.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


def test_an_unknown_precision_is_the_callers_fault(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"component_precisions\.queryformer"):
        _plain(_write(tmp_path, CONFIG, depth=2), precision="fp8")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    _write(tmp_path, CONFIG, depth=2)
    (tmp_path / missing).unlink()
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        _plain(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'queryformer' is missing: .*nowhere is no folder"):
        _plain(tmp_path / "nowhere")


def test_a_quantised_component_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, CONFIG | {"quantization_config": {"quant_method": "gptq"}}, depth=2)
    with pytest.raises(CheckpointError, match="is quantised"):
        _plain(tmp_path)


def test_the_config_and_the_headers_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, CONFIG, depth=2)
    module = "sglang.multimodal_gen.runtime.loader.component_loaders.component_loader"
    reads: list[str] = []
    for function in ("read_json_object", "find_checkpoint"):
        original = getattr(__import__(module, fromlist=["x"]), function)
        monkeypatch.setattr(
            f"{module}.{function}",
            lambda path, name=function, call=original: (reads.append(name), call(path))[1],
        )
    _plain(tmp_path)
    assert sorted(reads) == ["find_checkpoint", "read_json_object"]


def test_a_registered_class_wins_over_the_librarys(tmp_path: Path) -> None:
    ModelRegistry.register_model("AutoencoderTiny", SharedName)
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderTiny"}))
    assert isinstance(NeuralComponentLoader().load(_spec(tmp_path)).module, SharedName)


@pytest.mark.parametrize("library", ["torch", "os", "my_package", None])
def test_a_checkpoint_may_name_two_libraries_only(tmp_path: Path, library: str | None) -> None:
    _write(tmp_path, {"_class_name": "Linear", "width": 4})
    with pytest.raises(CheckpointError, match="only diffusers and transformers are searched"):
        NeuralComponentLoader().load(_spec(tmp_path, library=library))


def test_an_autoencoder_is_loaded(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "block_out_channels": (8, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": 4,
        "layers_per_block": 1,
        "scaling_factor": 0.37,
    }
    torch.manual_seed(4)
    vae: Any = AutoencoderKL(**config).eval()
    vae.save_pretrained(tmp_path, max_shard_size="20KB")
    loaded = NeuralComponentLoader().load(_spec(tmp_path, name="vae"))
    assert loaded.receipt is not None
    assert len(loaded.receipt.files) > 1
    module = loaded.module
    assert isinstance(module, AutoencoderKL)
    assert isinstance(module, ParallelTiledVAE), "the native subclass of that name"
    assert module.config["scaling_factor"] == 0.37
    image = torch.rand(1, 3, 16, 16)
    with torch.no_grad():
        latents = vae.encode(image).latent_dist.mean
        assert torch.equal(module.encode(image).latent_dist.mean, latents)
        assert torch.equal(module.decode(latents).sample, vae.decode(latents).sample)


class Buffered(ModelMixin, ConfigMixin):
    """Buffers of every kind, to see what Diffusers makes of their dtypes."""

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("plain", torch.ones(2), persistent=False)
        self.register_buffer("of_32_bits", torch.ones(2, dtype=torch.float32), persistent=False)
        self.register_buffer("of_64_bits", torch.ones(2, dtype=torch.float64), persistent=False)
        self.register_buffer("whole", torch.arange(2), persistent=False)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_computed_buffers_have_the_dtype_that_diffusers_gives_them(tmp_path: Path) -> None:
    Buffered().save_pretrained(tmp_path)
    ModelRegistry.register_model("Buffered", Buffered)
    library = Buffered.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    ours = NeuralComponentLoader().load(_spec(tmp_path, precision="bf16")).module
    wanted = {name: buffer.dtype for name, buffer in library.named_buffers()}
    assert {name: buffer.dtype for name, buffer in ours.named_buffers()} == wanted
    assert wanted["plain"] == torch.bfloat16
    assert wanted["of_32_bits"] == torch.float32


def test_a_loader_of_a_porter_is_a_load_module(tmp_path: Path) -> None:
    class Constant(ComponentLoader):
        def load_module(self, spec: ComponentSpec, progress: Any) -> tuple[Any, None]:
            return (spec.name, spec.precision), None

    loaded = Constant().load(_spec(tmp_path))
    assert (loaded.module, loaded.receipt) == (("queryformer", "fp32"), None)


def _ranks(size: int) -> ParallelState:
    group = Group("tp", 1, tuple(range(size)))
    return dataclasses.replace(ParallelState.single(), tp=group)


def test_a_denoiser_without_a_plan_is_not_replicated(tmp_path: Path) -> None:
    _write(tmp_path, CONFIG, depth=2)
    spec = _spec(tmp_path, is_denoiser=True, parallel=_ranks(2))
    said = "tp_size=2: QueryFormer has no TP_PLAN, so each rank would hold all of it"
    with pytest.raises(InvalidArgument, match=said):
        NeuralComponentLoader().load(spec)
    assert NeuralComponentLoader().load(_spec(tmp_path, is_denoiser=True)).receipt


def test_an_auxiliary_module_without_a_plan_stays_whole(tmp_path: Path) -> None:
    loaded = _plain(_write(tmp_path, CONFIG, depth=2), parallel=_ranks(2))
    assert loaded.receipt is not None
    assert loaded.receipt.sharded == 0


class Planned(QueryFormer):
    """With a table."""

    TP_PLAN = {"layers.*": Column(gather_output=True)}


def _neural(folder: Path, **changes: Any) -> LoadedComponent:
    return NeuralComponentLoader().load(_spec(folder, **changes))


def test_a_plan_is_put_in_force_before_weights_are_read(tmp_path: Path) -> None:
    ModelRegistry.register_model("Planned", Planned)
    _write(tmp_path, CONFIG | {"_class_name": "Planned"}, depth=2)
    loaded = _neural(tmp_path, is_denoiser=True, parallel=_ranks(2))
    assert loaded.receipt is not None
    assert loaded.receipt.sharded == 4
    assert loaded.module.layers[1].weight.shape == (2, 4)
    with pytest.raises(
        InvalidArgument, match=r"4 outputs of layers\.0 does not divide over tp_siz"
    ):
        _neural(tmp_path, is_denoiser=True, parallel=_ranks(3))


def test_a_wrong_row_is_found_on_one_rank_too(tmp_path: Path) -> None:
    ModelRegistry.register_model("Wrong", type("Wrong", (Planned,), {"TP_PLAN": {"x": Column()}}))
    with pytest.raises(PipelineDefinitionError, match="TP_PLAN of Wrong: 'x' matches no module"):
        _neural(_write(tmp_path, CONFIG | {"_class_name": "Wrong"}, depth=2))


def test_a_plain_loader_deals_nothing_over_ranks(tmp_path: Path) -> None:
    ModelRegistry.register_model("Planned", Planned)
    _write(tmp_path, CONFIG | {"_class_name": "Planned"}, depth=2)
    loaded = _plain(tmp_path, parallel=_ranks(2))
    assert loaded.receipt is not None
    assert loaded.receipt.sharded == 0
    assert loaded.module.layers[1].weight.shape == (4, 4)
    said = "tp_size=2: PlainStateDictComponentLoader .* 'queryformer'"
    with pytest.raises(InvalidArgument, match=said):
        _plain(tmp_path, is_denoiser=True, parallel=_ranks(2))


class Lenient(QueryFormer):
    """Declares what other loaders go by."""

    checkpoint_names = {"^old\\.": "layers."}
    _keys_to_ignore_on_load_unexpected = ["extra"]
    _keys_to_ignore_on_load_missing = ["kept"]

    def __init__(self, width: int, depth: int = 1) -> None:
        super().__init__(width, depth)
        self.register_buffer("kept", torch.zeros(width))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scale": torch.zeros(4)}, r"Unexpected \(1\): \[scale\]"),
        ({"extra": torch.zeros(4)}, r"Unexpected \(1\): \[extra\]"),
        ({"kept": None}, r"Missing \(1\): \[kept\]"),
        ({"layers.0.bias": None, "old.0.bias": torch.zeros(4)}, r"Missing \(1\).*Unexpected \(1\)"),
    ],
)
def test_a_plain_loader_takes_the_state_dict_as_it_is(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    ModelRegistry.register_model("Lenient", Lenient)
    _write(tmp_path, {"_class_name": "Lenient", "width": 4})
    state = {**Lenient(4).state_dict(), **change}
    tensors = {name: value for name, value in state.items() if value is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    assert _neural(tmp_path).receipt
    with pytest.raises(CheckpointError, match=said):
        _plain(tmp_path)
    save_file(Lenient(4).state_dict(), tmp_path / "model.safetensors")
    assert _plain(tmp_path).receipt


def test_fields_of_another_release_are_left_out_for_a_subclass_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Diffusers' own loading drops what its class does not know; a native subclass keeps that."""
    config: dict[str, Any] = {"block_out_channels": (8,), "norm_num_groups": 4}
    AutoencoderKL(**config).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"of_tomorrow": 1}))
    loaded = NeuralComponentLoader().load(_spec(tmp_path, name="vae"))
    assert isinstance(loaded.module, ParallelTiledVAE)
    assert "takes no of_tomorrow" in caplog.text
