"""Eight-bit weights as a checkpoint brings them: quantised as they load, or stored so."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.layers.quantization.fp8 import Fp8Method, dequantized
from sglang.multimodal_gen.runtime.layers.quantization.install import method_of, quantize_linears
from sglang.multimodal_gen.runtime.layers.shard import Shard, sharded
from sglang.multimodal_gen.runtime.loader.checkpoint import find_checkpoint
from sglang.multimodal_gen.runtime.loader.components import (
    components_facts,
    outline_components,
)
from sglang.multimodal_gen.runtime.loader.meta_build import build_on_meta
from sglang.multimodal_gen.runtime.loader.model_source import resolve_model_source
from sglang.multimodal_gen.runtime.loader.stored_fp8 import refuse_unreadable, sort_stored
from sglang.multimodal_gen.runtime.loader.weights import load_weights
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.planning.dry_run import DryRun
from sglang.multimodal_gen.runtime.planning.estimate import estimate
from sglang.multimodal_gen.runtime.planning.gpus import gpu_named
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, InvalidArgument

E4M3 = torch.float8_e4m3fn


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 48), nn.Linear(48, 16, bias=False)
        self.norm = nn.LayerNorm(16)


def weights():
    torch.manual_seed(0)
    return {name: tensor.to(torch.bfloat16) for name, tensor in Two().state_dict().items()}


def stored(values, granularity="row", scale="weight_scale", shape=(-1,)):
    """The same as a checkpoint in eight bits."""
    out = dict(values)
    for name in ("a.weight", "b.weight"):
        out[name], scales = Fp8Method(granularity).quantize_weight(values[name])
        out[name.replace("weight", scale)] = scales.reshape(shape)
    return out


def loaded(folder, tensors, method, slices=None, **options):
    folder.mkdir(exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    module = build_on_meta(Two)
    for path, shard in (slices or {}).items():
        owner = module.get_submodule(path)
        owner.weight = sharded(owner.weight, shard)
    if method is not None:
        quantize_linears(module, method)
    receipt = load_weights(
        module, find_checkpoint(folder), device="cpu", dtype=torch.bfloat16, label="two", **options
    )
    return module, receipt


def test_weights_are_quantised_as_they_load(tmp_path):
    values = weights()
    module, receipt = loaded(tmp_path, values, Fp8Method())
    for path in ("a", "b"):
        linear, want = module.get_submodule(path), values[f"{path}.weight"]
        assert linear.weight.dtype == E4M3
        assert linear.weight_scale.dtype == torch.float32
        rounded = dequantized(linear.weight, linear.weight_scale)
        assert 1e-3 < ((rounded - want).norm() / want.norm()).item() < 0.03
    assert module.norm.weight.dtype == module.a.bias.dtype == torch.bfloat16
    assert receipt.dtypes == {"BF16 -> float8_e4m3fn": 2, "BF16 -> bfloat16": 3}


@pytest.mark.parametrize(
    ("granularity", "scale", "shape"),
    [("row", "weight_scale", (-1,)), ("row", "weight_scale", (-1, 1)),
     ("tensor", "weight_scale", ()), ("tensor", "scale_weight", (1,))],
)  # fmt: skip
def test_stored_scales_give_the_online_twin(tmp_path, granularity, scale, shape):
    values = weights()
    twin, _ = loaded(tmp_path / "plain", values, Fp8Method(granularity))
    named = stored(values, granularity, scale, shape)
    named |= {"a.input_scale": torch.ones(()), "scaled_fp8": torch.empty(2, dtype=E4M3)}
    module, receipt = loaded(tmp_path / "stored", named, Fp8Method(granularity))
    for path in ("a", "b"):
        one, other = module.get_submodule(path), twin.get_submodule(path)
        assert torch.equal(one.weight.view(torch.uint8), other.weight.view(torch.uint8))
        assert torch.equal(one.weight_scale, other.weight_scale)
    assert set(receipt.ignored) == {"a.input_scale", "scaled_fp8"}
    x = torch.randn(20, 32)
    by_row, _ = loaded(tmp_path / "stored", named, Fp8Method("row"))
    widened, _ = loaded(tmp_path / "stored", named, None)
    assert widened.a.weight.dtype == torch.bfloat16
    expected = nn.functional.linear(x.bfloat16(), widened.a.weight, widened.a.bias).float()
    error = (by_row.a(x.bfloat16()).float() - expected).norm() / expected.norm()
    assert error < 0.04


def test_a_slice_takes_the_scales_of_its_rows(tmp_path):
    values = stored(weights())
    column, row = Shard(0, (24, 24), 1, 3), Shard(1, (48,), 1, 3)
    module, _ = loaded(tmp_path, values, Fp8Method(), {"a": column, "b": row})
    whole = values["a.weight_scale"]
    assert torch.equal(module.a.weight_scale, torch.cat((whole[8:16], whole[32:40])))
    assert torch.equal(module.b.weight_scale, values["b.weight_scale"])
    assert module.b.weight.shape == (16, 16)
    kept = module.a.weight.view(torch.uint8), values["a.weight"].view(torch.uint8)
    assert torch.equal(kept[0], torch.cat((kept[1][8:16], kept[1][32:40])))


@pytest.mark.parametrize(
    ("change", "said"),
    [({"a.weight_scale_inv": torch.ones(1, 1)}, "fp8 in blocks"),
     ({"a.qweight": torch.ones(1, dtype=torch.int32)}, "GPTQ or AWQ"),
     ({"a.weight_scale": torch.ones(7)}, r"shape \[7\]"),
     ({"a.weight": torch.ones(48, 32, dtype=torch.int8)}, "stores 'a.weight' as I8")],
)  # fmt: skip
def test_other_methods_are_refused_by_name(tmp_path, change, said):
    tensors = {k: v.contiguous() for k, v in (stored(weights()) | change).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        sort_stored(find_checkpoint(tmp_path), "two")


@pytest.mark.parametrize(
    ("said", "name"),
    [({"quant_method": "torchao"}, "torchao"), ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
     ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
     ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "pack-quantized")],
)  # fmt: skip
def test_a_config_says_what_cannot_be_read(said, name):
    with pytest.raises(CheckpointError, match=name):
        refuse_unreadable({"quantization_config": said}, "transformer", "here")
    refuse_unreadable({"quantization_config": {"quant_method": "fp8"}}, "transformer", "here")
    refuse_unreadable({}, "transformer", "here")


def test_row_scales_are_not_taken_for_one(tmp_path):
    with pytest.raises(CheckpointError, match="use --quantization fp8, not fp8-tensor"):
        loaded(tmp_path, stored(weights()), Fp8Method("tensor"))


@pytest.fixture(scope="module")
def demo_in_fp8(tmp_path_factory):
    """The bundled model with its denoiser's blocks stored in eight bits."""
    root = resolve_model_source("demo", None).root
    folder = tmp_path_factory.mktemp("demo") / "fp8"
    shutil.copytree(root, folder)
    (file,) = (folder / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    for name in [n for n in tensors if n.endswith(".weight") and "blocks" in n]:
        if tensors[name].ndim == 2:
            tensors[name], scale = Fp8Method().quantize_weight(tensors[name])
            tensors[name.removesuffix("weight") + "weight_scale"] = scale
    file.unlink()
    save_file(tensors, file)
    return folder


def picture(model="demo", look=lambda generator: None, **flags):
    """A picture, and what ``look`` says of the open generator."""
    with DiffGenerator.from_pretrained(str(model), device="cpu", **flags) as generator:
        made = generator.generate(prompt="a red circle", seed=1, num_inference_steps=2)
        return made[0].array, look(generator)


def held_in_eight_bits(generator):
    transformer = generator.pipeline.modules["transformer"]
    held = [p for p, m in transformer.named_modules() if method_of(m) is not None]
    return held, generator.notes


def streamed_bytes(generator):
    return generator.pipeline.residency.components["transformer"].stream_counters.bytes


@pytest.mark.slow
def test_the_demo_in_eight_bits(demo_in_fp8):
    """Online, stored, and streamed block by block: the same picture, near the plain one."""
    plain, _ = picture()
    online, (held, notes) = picture(quantization="fp8", look=held_in_eight_bits)
    assert len(held) == 64
    assert not [path for path in held if "embed" in path or path == "proj_out"]
    assert any("64 of 72 linears of transformer" in note for note in notes)
    assert not np.array_equal(online, plain)
    assert np.abs(online.astype(float) - plain).mean() < 6
    from_file, _ = picture(demo_in_fp8)
    assert np.array_equal(from_file, online)
    streamed, moved = picture(
        quantization="fp8", layerwise_offload_components=["transformer"], look=streamed_bytes
    )
    assert np.array_equal(streamed, online)
    assert moved > 0


def test_what_cannot_be_quantised_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match=r"'blocks\.x' matches no linear"):
        picture(quantization="fp8", quantization_ignored_layers=["blocks.x"])
    with pytest.raises(InvalidArgument, match="nothing is quantised"):
        picture(quantization_ignored_layers=["*"])


def test_loading_never_holds_the_weights_in_their_stored_type(tmp_path):
    """The largest tensor that is there unquantised is one weight."""
    seen: list[int] = []
    method = Fp8Method()

    class Watched(Fp8Method):
        def quantize_weight(self, weight):
            held = sum(
                p.nbytes
                for p in module.parameters()
                if not p.is_meta and p.dtype == torch.bfloat16 and p.ndim == 2
            )
            seen.append(held)
            return method.quantize_weight(weight)

    save_file(weights(), tmp_path / "model.safetensors")
    module = build_on_meta(Two)
    quantize_linears(module, Watched())
    load_weights(module, find_checkpoint(tmp_path), device="cpu", dtype=torch.bfloat16, label="two")
    assert seen == [0, 0]


def test_the_plan_knows_the_bytes(demo_in_fp8):
    def planned(model, **flags):
        args = ServerArgs.from_flat(model_path=str(model), precision="bf16", **flags)
        found = ModelDescription.find(args)
        cls = found.info.pipeline_cls
        rest = (found.source, cls._index_names(), found.server_args, cls.component_loaders,
                cls.default_component_configs)  # fmt: skip
        single = ParallelState.single("cpu")
        facts = components_facts(*rest, parallel=single)
        made = outline_components(*rest, parallel=single)["transformer"]
        real = sum(parameter.nbytes for parameter in made.parameters())
        return next(f.nbytes for f in facts if f.name == "transformer"), real

    before, _ = planned("demo")
    said, real = planned("demo", quantization="fp8")
    assert said == pytest.approx(real, rel=0.001)
    assert planned(demo_in_fp8) == (said, real)
    assert said < 0.57 * before
    ignored, real = planned("demo", quantization="fp8", quantization_ignored_layers=["*.ff.*"])
    assert ignored == pytest.approx(real, rel=0.001)
    assert said < ignored < before


def test_a_gpu_that_cannot_is_told_what_is_missing():
    args = ServerArgs.from_flat(model_path="demo", quantization="fp8")
    with pytest.raises(InvalidArgument, match=r"compute capability 8\.9 .* this GPU has 8\.0"):
        estimate(args, {}, gpu_named("a100-80g"), 8.0)


def test_a_planned_product_in_eight_bits_is_counted_as_one():
    linear = nn.Sequential(nn.Linear(64, 48, device="meta")).requires_grad_(False)
    quantize_linears(linear, Fp8Method())
    with torch.inference_mode(), DryRun() as run:
        linear(torch.empty(40, 64, device="meta", dtype=torch.bfloat16))
    products = [(k.flops, k.bits) for k in run.tally.kernels if k.kind == "product"]
    assert products == [(2 * 40 * 64 * 48, 8)]
    h200 = gpu_named("h200")
    eight, sixteen = (h200.seconds("product", 1e12, 0, bits) for bits in (8, 16))
    assert 0.5 < eight / sixteen < 0.6
