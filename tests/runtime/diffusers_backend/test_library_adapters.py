"""Adapters on the Diffusers backend, beside direct calls of Diffusers with the same file."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import nn

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.diffusers_backend import library_adapters
from sglang.multimodal_gen.runtime.utils.errors import (
    CheckpointError,
    InvalidArgument,
    InvalidRequest,
    UserError,
)

SMALL = {"prompt": "a red fox", "height": 16, "width": 24, "num_inference_steps": 2}
RANK = 2


def load_direct(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def factors(pipeline, component, seed, keep):
    """PEFT's names under Diffusers' prefix -> factors, strong enough to see."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, module in getattr(pipeline, component).named_modules():
        if isinstance(module, nn.Linear) and any(part in path for part in keep):
            down = torch.randn(RANK, module.in_features, generator=generator)
            up = torch.randn(module.out_features, RANK, generator=generator)
            tensors[f"{component}.{path}.lora_A.weight"] = down / module.in_features**0.5
            tensors[f"{component}.{path}.lora_B.weight"] = up
    return tensors


@pytest.fixture(scope="session")
def files(tiny, tmp_path_factory):
    """LoRA files by name: of the U-Net, of both components, of an older spelling, of none."""
    folder = tmp_path_factory.mktemp("adapters")
    pipeline = load_direct(tiny("unet"))
    unet = factors(pipeline, "unet", 1, ("to_q", "to_v", "to_out.0"))
    both = factors(pipeline, "unet", 2, ("to_k",)) | factors(
        pipeline, "text_encoder", 3, ("q_proj",)
    )
    older = {
        name.replace("attn1.to_q.lora_A", "attn1.processor.to_q_lora.down")
        .replace("attn1.to_q.lora_B", "attn1.processor.to_q_lora.up"): tensor
        for name, tensor in unet.items()
        if ".attn1.to_q." in name
    }  # fmt: skip
    kohya = {}
    for name, tensor in unet.items():
        path, _, factor = name.removesuffix(".weight").removeprefix("unet.").rpartition(".lora_")
        stem = f"lora_unet_{path.replace('.', '_')}"
        kohya[f"{stem}.lora_{'down' if factor == 'A' else 'up'}.weight"] = tensor
        kohya[f"{stem}.alpha"] = torch.tensor(2.0 * RANK)
    stray = {f"unet.nowhere.lora_{x}.weight": torch.ones(2, 2) for x in "AB"}
    contents = {
        "unet": unet,
        "both": both,
        "older": older,
        "kohya": kohya,
        "stray": unet | stray,
        "alien": {name.replace("unet.", "transformer.x."): t for name, t in unet.items()},
        "nan": {name: t * torch.nan for name, t in unet.items()},
        "untrained": {name: t * ("lora_A" in name) for name, t in unet.items()},
        "off": kohya | {n: torch.tensor(0.0) for n in kohya if n.endswith(".alpha")},
        "no number": kohya | {n: torch.tensor(torch.nan) for n in kohya if n.endswith(".alpha")},
        "huge": {name: t * 1e30 for name, t in unet.items()},
        "empty": {},
        "misfit": {name: torch.ones(RANK, 3) for name in unet},
    }
    for name, tensors in contents.items():
        save_file(tensors, folder / f"{name}.safetensors")
    config = LoraConfig(r=RANK, lora_alpha=3 * RANK, target_modules=["to_q", "to_v", "to_out.0"])
    values = config.to_dict() | {"target_modules": sorted(config.target_modules)}
    metadata = json.dumps({f"unet.{key}": value for key, value in values.items()})
    save_file(unet, folder / "scaled.safetensors", {"lora_adapter_metadata": metadata})
    return {name: str(folder / f"{name}.safetensors") for name in (*contents, "scaled")}


@pytest.fixture
def generator(tiny):
    made = DiffGenerator.from_pretrained(str(tiny("unet")), device="cpu")
    yield made
    made.close()


def picture(generator, **values):
    return generator.generate(seed=7, **SMALL, **values)[0].array


@pytest.fixture(scope="session")
def direct(tiny):
    """A picture as a user of Diffusers makes it with adapter files and weights."""

    def make(*adapters):
        pipeline = load_direct(tiny("unet"))
        for index, (path, _) in enumerate(adapters):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pipeline.load_lora_weights(path, adapter_name=f"a{index}")
        if adapters:
            names = [f"a{index}" for index in range(len(adapters))]
            pipeline.set_adapters(names, [weight for _, weight in adapters])
        (image,) = pipeline(generator=torch.Generator().manual_seed(7), **SMALL).images
        return np.asarray(image)

    return make


def plain(generator):
    """The components' weights, and that no adapter's layer is left."""
    pipeline = generator.pipeline.get_module("pipeline")
    return {
        f"{name}.{key}": tensor.clone()
        for name in ("unet", "text_encoder")
        for key, tensor in getattr(pipeline, name).state_dict().items()
    }


@pytest.mark.parametrize("name", ["unet", "both", "older", "kohya", "scaled"])
def test_a_picture_is_that_of_diffusers_with_the_same_file_and_unset_is_the_base(
    generator, direct, files, name
):
    weights = plain(generator)
    base = picture(generator)
    (receipt,) = generator.set_lora("ink", files[name], strength=0.7)
    moved = picture(generator)
    assert (moved != base).any()
    assert (moved == direct((files[name], 0.7))).all()
    assert not receipt.leftovers()
    assert receipt.ranks == (RANK,)
    assert list(receipt.scaling) == [{"scaled": 3.0, "kohya": 2.0}.get(name, 1.0)]
    assert len(receipt.matched) == 2 * sum(map(len, receipt.modules.values()))
    assert set(receipt.modules) == ({"unet", "text_encoder"} if name == "both" else {"unet"})
    assert all(change > 0.05 for change in receipt.relative_change.values())
    (active,) = generator.list_loras()["active"]["unet"]
    assert (active["nickname"], active["strength"], active["merged"]) == ("ink", 0.7, False)
    generator.unset_lora()
    assert (picture(generator) == base).all()
    generator.pipeline.unload_lora_adapter("ink")
    after = plain(generator)
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[key], weights[key]) for key in weights)


def test_merged_weights_come_back_bit_for_bit(generator, direct, files):
    weights = plain(generator)
    base = picture(generator)
    generator.set_lora(
        ["a", "b"], [files["unet"], files["both"]], strength=[0.5, -0.4], merge_mode="merge"
    )
    merged = picture(generator)
    layer = generator.pipeline.get_module("pipeline").unet.get_submodule(
        "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
    )
    assert layer.merged_adapters
    expected = direct((files["unet"], 0.5), (files["both"], -0.4))
    assert (expected != base).any()
    assert abs(merged.astype(int) - expected.astype(int)).max() <= 1
    assert (picture(generator, lora=[]) == base).all()
    assert (picture(generator) == merged).all()
    generator.unmerge_lora_weights()
    assert not layer.merged_adapters
    assert (picture(generator) == base).all()
    generator.pipeline.unload_lora_adapter("a")
    generator.pipeline.unload_lora_adapter("b")
    after = plain(generator)
    assert all(torch.equal(after[key], weights[key]) for key in weights)


def test_requests_choose_and_leave_no_trace(generator, direct, files):
    base = picture(generator)
    generator.set_lora("ink", files["unet"], strength=0.7)
    standing = picture(generator)
    for path, weight in ((files["both"], 1.5), (files["scaled"], 0.3)):
        chosen = picture(generator, lora=[{"path": path, "weight": weight}])
        assert (chosen == direct((path, weight))).all()
        assert (picture(generator) == standing).all()
    two = picture(generator, lora=["ink=0.2", {"path": files["both"], "weight": 1.0}])
    assert (two == direct((files["unet"], 0.2), (files["both"], 1.0))).all()
    assert (picture(generator, lora=[]) == base).all()
    assert (picture(generator, lora=["ink=0"]) == base).all()
    with pytest.raises(InvalidRequest, match="Did you mean 'ink'"):
        picture(generator, lora=["inc"])
    with pytest.raises(CheckpointError):
        picture(generator, lora=["ink", files["alien"]])
    assert (picture(generator) == standing).all()


def test_what_a_call_does_to_weights_is_undone(generator, files):
    generator.set_lora("ink", files["both"], strength=0.7)
    standing = picture(generator)
    for scale in (0.0, 0.3):
        extra = {"cross_attention_kwargs": {"scale": scale}}
        scaled = picture(generator, diffusers_kwargs=extra)
        assert (scaled != standing).any()
        assert (picture(generator) == standing).all()
    (receipt,) = generator.set_lora("more", files["both"])
    assert list(receipt.scaling) == [1.0], "at its own weight, whatever the last call's scale was"


def test_a_component_can_be_the_only_target(generator, files):
    generator.set_lora("x", files["both"])
    everything = picture(generator)
    generator.unset_lora("text_encoder")
    unet_alone = picture(generator)
    generator.unset_lora()
    base = picture(generator)
    generator.set_lora("x", target="unet")
    assert (picture(generator) == unet_alone).all()
    assert len({p.tobytes() for p in (everything, unet_alone, base)}) == 3
    with pytest.raises(InvalidArgument, match="choose one of all, unet, text_encoder"):
        generator.set_lora("x", target="vae")


def test_files_named_by_requests_are_let_go_of(generator, files, tmp_path):
    paths = []
    for index in range(6):
        paths.append(tmp_path / f"{index}.safetensors")
        paths[-1].write_bytes(Path(files["unet"]).read_bytes())
    picture(generator, lora=[{"path": str(path), "weight": 0.1} for path in paths])
    pipeline = generator.pipeline.get_module("pipeline")
    assert len(pipeline.get_list_adapters()["unet"]) == 4


def test_start_up_flags_put_adapters_in_force(tiny, direct, files):
    generator = DiffGenerator.from_pretrained(
        str(tiny("unet")), device="cpu", lora_path=files["unet"], lora_nickname="ink",
        lora_scale=0.7,
    )  # fmt: skip
    try:
        assert (picture(generator) == direct((files["unet"], 0.7))).all()
        assert any("lora 'ink'" in note and "read by Diffusers" in note for note in generator.notes)
    finally:
        generator.close()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("alien", r"changes nothing.*It has: .*The model has: unet\."),
        ("misfit", r"Diffusers cannot load it.*It has: .*The model has: unet\."),
        ("nan", r"tensor 'unet\..*' holds NaN"),
        ("no number", r"alpha' holds NaN"),
        ("huge", "too large for its weights"),
        ("untrained", "changes nothing of this pipeline: its factors multiply to 0"),
        ("off", "changes nothing of this pipeline"),
        ("empty", "holds no tensors"),
    ],
)
def test_a_file_that_does_not_fit_is_an_error_and_changes_nothing(generator, files, name, problem):
    weights = plain(generator)
    with pytest.raises(CheckpointError, match=problem):
        generator.set_lora("x", files[name])
    assert generator.list_loras() == {"loaded_adapters": [], "active": {}}
    after = plain(generator)
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[key], weights[key]) for key in weights)
    generator.set_lora("x", files["unet"])
    before = picture(generator)
    with pytest.raises(CheckpointError):
        generator.set_lora("y", files[name])
    assert (picture(generator) == before).all()


def test_tensors_that_name_nothing_are_told(generator, files):
    (receipt,) = generator.set_lora("x", files["stray"])
    assert receipt.unmatched == ("unet.nowhere.lora_A.weight", "unet.nowhere.lora_B.weight")
    result = generator.generate(seed=7, **SMALL, lora=[files["stray"]])
    assert any("2 tensors name no module" in warning for warning in result.warnings)


def test_scaling_that_diffusers_would_not_read_is_refused(generator, files, tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(Path(files["unet"]).read_bytes())
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    generator.set_lora("fits", str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 9}))
    with pytest.raises(CheckpointError, match="which Diffusers does not read"):
        generator.set_lora("other", str(tmp_path))


def test_a_pipeline_without_adapters_refuses_them_by_name(tiny, files):
    folder = str(tiny("unconditional"))
    refusal = "DDPMPipeline of Diffusers takes no LoRA adapters"
    with pytest.raises(InvalidArgument, match=refusal):
        DiffGenerator.from_pretrained(folder, device="cpu", lora_path=files["unet"])
    generator = DiffGenerator.from_pretrained(folder, device="cpu")
    try:
        with pytest.raises(UserError, match=refusal):
            generator.set_lora("x", files["unet"])
        with pytest.raises(InvalidRequest, match=refusal):
            generator.generate(num_inference_steps=1, lora=[files["unet"]])
        assert generator.list_loras() == {"loaded_adapters": [], "active": {}}
        generator.unset_lora()
        generator.generate(num_inference_steps=1)
    finally:
        generator.close()


def test_without_peft_the_extra_is_named(tiny, files, monkeypatch):
    monkeypatch.setattr(library_adapters, "USE_PEFT_BACKEND", False)
    with pytest.raises(InvalidArgument, match=r"sglang-diffusion\[diffusers\]"):
        DiffGenerator.from_pretrained(str(tiny("unet")), device="cpu", lora_path=files["unet"])
