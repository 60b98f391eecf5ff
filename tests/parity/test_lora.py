"""LoRA against Diffusers with the same file, and against weights merged by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.verify.measure import largest_difference

from parity.compare import compare
from parity.family import FLUX_DEV
from parity.harness import MOVED, checkpoint_folder
from parity.oracle import load_oracle, trace_of
from parity.runtime_trace import opened_runtime, record_runtime
from parity.tiny_adapters import Adapter, authors_adapter, diffusers_adapter
from parity.tiny_checkpoints import flux_dev
from parity.trace import Trace

REQUEST = {
    "prompt": "a small red circle above the fox",
    "seed": 5,
    "height": 64,
    "width": 64,
    "num_inference_steps": 2,
    "guidance_scale": 3.5,
    "max_sequence_length": 32,
}


# The reference's way of saying that a second adapter was loaded.
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")


@pytest.fixture(scope="module")
def root(checkpoints: Path) -> Path:
    return checkpoint_folder(flux_dev(), checkpoints)


@pytest.fixture(scope="module")
def generator(root: Path):
    with opened_runtime(root) as generator:
        yield generator


@pytest.fixture(scope="module")
def model(root: Path):
    return load_oracle(root, FLUX_DEV.reference).transformer


def diffusers_trace(root: Path, adapters: Mapping[str, tuple[Path, float]]) -> Trace:
    """The reference with files loaded under names, with weights."""
    pipeline = load_oracle(root, FLUX_DEV.reference)
    try:
        for name, (path, _) in adapters.items():
            pipeline.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=name)
        pipeline.set_adapters(list(adapters), [weight for _, weight in adapters.values()])
        return trace_of(pipeline, FLUX_DEV, REQUEST)
    finally:
        pipeline.unload_lora_weights()


def merged_by_hand(root: Path, changes: Sequence[tuple[Mapping[str, Tensor], float]]) -> Trace:
    """The reference with ``W + weight * change``, computed here."""
    pipeline = load_oracle(root, FLUX_DEV.reference)
    kept = {name: tensor.clone() for name, tensor in pipeline.transformer.state_dict().items()}
    try:
        with torch.no_grad():
            for change, weight in changes:
                for path, delta in change.items():
                    pipeline.transformer.get_submodule(path).weight += weight * delta
        return trace_of(pipeline, FLUX_DEV, REQUEST)
    finally:
        pipeline.transformer.load_state_dict(kept)


def assert_equal(generator: DiffGenerator, expected: Trace, lora: Any) -> None:
    """A request with ``lora`` equals ``expected``, which is not the base."""
    base = record_runtime(generator, FLUX_DEV, REQUEST)
    assert largest_difference(expected.pixels, base.pixels) > MOVED, "the adapter moves nothing"
    report = compare(record_runtime(generator, FLUX_DEV, {**REQUEST, "lora": lora}), expected)
    assert not report.broken, f"\n{report}"


def config(**values: Any) -> dict[str, Any]:
    """Diffusers' metadata; keys carry their component."""
    whole = {"r": 4, "lora_alpha": 4, "target_modules": ["to_q"], **values}
    return {f"transformer.{key}": value for key, value in whole.items()}


DIFFUSERS = {
    "no alpha": (1.0, None),
    "alpha = 2 r": (2.0, {"lora_alpha": 8}),
    "alpha = r / 2": (0.5, {"lora_alpha": 2}),
    "rsLoRA": (3.0, {"lora_alpha": 6, "use_rslora": True}),
}


@pytest.mark.parametrize("case", DIFFUSERS)
def test_diffusers_files(root, generator, model, tmp_path, case):
    scaling, metadata = DIFFUSERS[case]
    adapter = diffusers_adapter(model, 1, scaling=scaling)
    if metadata is not None:
        targets = list(adapter.changes)
        metadata = config(**metadata, target_modules=targets)
    path = adapter.save(tmp_path / "lora.safetensors", metadata)
    expected = diffusers_trace(root, {"a": (path, 1.0)})
    assert not compare(merged_by_hand(root, [(adapter.changes, 1.0)]), expected).broken
    assert_equal(generator, expected, [{"path": path}])


def test_differing_ranks_and_alphas_by_layer(root, generator, model, tmp_path):
    adapter = Adapter(model, 3)
    for index, (rank, alpha) in enumerate([(2, 6.0), (8, 4.0)]):
        for name in ("to_q", "to_v", "add_k_proj"):
            path = f"transformer_blocks.{index}.attn.{name}"
            adapter.add((path,), f"transformer.{path}", rank=rank, alpha=alpha)
    path = adapter.save(tmp_path / "lora.safetensors")
    expected = diffusers_trace(root, {"a": (path, 1.0)})
    assert_equal(generator, expected, [{"path": path}])


def test_differing_ranks_without_alpha(root, generator, model, tmp_path):
    adapter = Adapter(model, 4)
    for index, rank in enumerate((2, 8)):
        path = f"single_transformer_blocks.{index}.attn.to_v"
        adapter.add((path,), f"transformer.{path}", rank=rank)
    path = adapter.save(tmp_path / "lora.safetensors")
    assert_equal(generator, diffusers_trace(root, {"a": (path, 1.0)}), [{"path": path}])


@pytest.mark.parametrize("alpha", [1.0, 4.0, 10.0, None])
def test_kohya_files(root, generator, model, tmp_path, alpha):
    """Without linear1, whose sizes are literals in the reference's converter."""
    adapter = authors_adapter(model, 2, kohya=True, alpha=alpha, without=("single_blocks.{i}.l",))
    path = adapter.save(tmp_path / "lora.safetensors")
    assert_equal(generator, diffusers_trace(root, {"a": (path, 1.0)}), [{"path": path}])


XLABS = {
    "double_blocks.{}.processor.qkv_lora1": ("to_q", "to_k", "to_v"),
    "double_blocks.{}.processor.qkv_lora2": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "double_blocks.{}.processor.proj_lora1": ("to_out.0",),
    "double_blocks.{}.processor.proj_lora2": ("to_add_out",),
    "single_blocks.{}.processor.qkv_lora": ("to_q", "to_k", "to_v"),
}


def test_xlabs_files(root, generator, model, tmp_path):
    adapter = Adapter(model, 6)
    for name, targets in XLABS.items():
        blocks = "transformer_blocks" if "double" in name else "single_transformer_blocks"
        for i in range(2):
            paths = tuple(f"{blocks}.{i}.attn.{target}" for target in targets)
            adapter.add(paths, name.format(i), parts=(".down.weight", ".up.weight"))
    path = adapter.save(tmp_path / "lora.safetensors")
    assert_equal(generator, diffusers_trace(root, {"a": (path, 1.0)}), [{"path": path}])


HAND = {
    "Kohya": {"kohya": True, "alpha": 2.0},
    "ComfyUI": {"kohya": False, "alpha": 10.0},
    "ComfyUI, A and B": {
        "kohya": False,
        "alpha": None,
        "parts": (".lora_A.weight", ".lora_B.weight"),
    },
    "authors' names under transformer": {
        "kohya": False,
        "alpha": 2.0,
        "prefix": "transformer.",
    },
    "PEFT on the authors' names": {
        "kohya": False,
        "alpha": None,
        "prefix": "base_model.model.",
        "parts": (".lora_A.weight", ".lora_B.weight"),
    },
}


@pytest.mark.parametrize("case", HAND)
def test_authors_names_against_weights_merged_by_hand(root, generator, model, tmp_path, case):
    adapter = authors_adapter(model, 5, **HAND[case])
    path = adapter.save(tmp_path / "lora.safetensors")
    assert_equal(generator, merged_by_hand(root, [(adapter.changes, 1.0)]), [{"path": path}])


@pytest.mark.parametrize(
    ("prefix", "parts"),
    [
        ("transformer.", (".lora.down.weight", ".lora.up.weight")),
        ("", (".lora_down.weight", ".lora_up.weight")),
        ("base_model.model.", (".lora_A.default.weight", ".lora_B.default.weight")),
        ("base_model.model.transformer.", (".lora_A.weight", ".lora_B.weight")),
    ],
)
def test_other_spellings_of_diffusers_names(root, generator, model, tmp_path, prefix, parts):
    adapter = diffusers_adapter(model, 7, prefix=prefix, parts=parts)
    path = adapter.save(tmp_path / "lora.safetensors")
    assert_equal(generator, merged_by_hand(root, [(adapter.changes, 1.0)]), [{"path": path}])


def test_the_last_norm_has_shift_first_in_the_authors_order(root, generator, model, tmp_path):
    """By hand: the reference's converter loses the prefix of these keys, and then drops them."""
    adapter = Adapter(model, 8, strength=2.0)
    name = "lora_unet_final_layer_adaLN_modulation_1"
    adapter.add(("norm_out.linear",), name, parts=(".lora_down.weight", ".lora_up.weight"))
    path = adapter.save(tmp_path / "lora.safetensors")
    shift, scale = adapter.changes["norm_out.linear"].chunk(2)
    change = {"norm_out.linear": torch.cat((scale, shift))}
    assert_equal(generator, merged_by_hand(root, [(change, 1.0)]), [{"path": path}])


@pytest.mark.parametrize("live", [True, False])
def test_two_adapters_add_up(root, generator, model, tmp_path, live):
    one, two = diffusers_adapter(model, 11), diffusers_adapter(model, 12, rank=2)
    paths = [one.save(tmp_path / "one.safetensors"), two.save(tmp_path / "two.safetensors")]
    expected = diffusers_trace(root, {"one": (paths[0], 0.7), "two": (paths[1], 0.5)})
    by_hand = merged_by_hand(root, [(one.changes, 0.7), (two.changes, 0.5)])
    assert not compare(by_hand, expected).broken
    if live:
        choices = [{"path": paths[0], "weight": 0.7}, {"path": paths[1], "weight": 0.5}]
        assert_equal(generator, expected, choices)
        first = record_runtime(generator, FLUX_DEV, {**REQUEST, "lora": choices})
        turned = record_runtime(generator, FLUX_DEV, {**REQUEST, "lora": choices[::-1]})
        assert torch.equal(first.pixels, turned.pixels)
        return
    try:
        files = [str(path) for path in paths]
        generator.set_lora(["one", "two"], files, strength=[0.7, 0.5], merge_mode="merge")
        report = compare(record_runtime(generator, FLUX_DEV, REQUEST), expected)
        assert not report.broken, f"\n{report}"
    finally:
        generator.unset_lora()


@pytest.mark.parametrize("key", ["diffusers", "kohya"])
def test_text_encoder_keys_are_applied_too(root, generator, tmp_path, key):
    encoder = load_oracle(root, FLUX_DEV.reference).text_encoder
    adapter = Adapter(encoder, 13, strength=2.0)
    for path in adapter.linears:
        if "attn" in path:
            inner = path.removeprefix("text_model.")
            if key == "diffusers":
                adapter.add((path,), f"text_encoder.text_model.{inner}")
            else:
                flat = "lora_te1_text_model_" + inner.replace(".", "_")
                adapter.add(
                    (path,), flat, alpha=2.0, parts=(".lora_down.weight", ".lora_up.weight")
                )
    path = adapter.save(tmp_path / "lora.safetensors")
    base = record_runtime(generator, FLUX_DEV, REQUEST)
    ours = record_runtime(generator, FLUX_DEV, {**REQUEST, "lora": [{"path": path}]})
    kept = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    try:
        with torch.no_grad():
            for path, delta in adapter.changes.items():
                encoder.get_submodule(path).weight += delta
        expected = trace_of(load_oracle(root, FLUX_DEV.reference), FLUX_DEV, REQUEST)
    finally:
        encoder.load_state_dict(kept)
    assert largest_difference(expected.pixels, base.pixels) > MOVED
    assert not compare(ours, expected).broken
