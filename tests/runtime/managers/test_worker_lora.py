from __future__ import annotations

import dataclasses

import pytest
import torch

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.managers.worker import Worker
from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import (
    CheckpointError,
    InvalidArgument,
    InvalidRequest,
    UserError,
)

from parity.tiny_adapters import diffusers_adapter

SMALL = {"height": 32, "width": 32, "num_inference_steps": 1, "max_sequence_length": 16}
MOVED = 3


@pytest.fixture(scope="module")
def files(folder, tmp_path_factory):
    """Adapters a and b: name -> path."""
    place = tmp_path_factory.mktemp("adapters")
    with opened(folder) as generator:
        model = generator.pipeline.get_module("transformer")
        return {
            name: str(diffusers_adapter(model, seed).save(place / f"{name}.safetensors"))
            for seed, name in enumerate("ab")
        }


def opened(folder, **arguments):
    return DiffGenerator.from_pretrained(str(folder), device="cpu", **arguments)


def picture(generator, **request):
    values = {"prompt": "a fox", "seed": 1, "num_outputs_per_prompt": 3, **SMALL, **request}
    return torch.stack([torch.from_numpy(image.array) for image in generator.generate(values)])


def differs(one, other):
    return (one.int() - other.int()).abs().max() > MOVED


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nothing_of_one_request_survives_into_the_next(folder, files, precision):
    """Batches of two images: each request takes two of them."""
    requests = {
        "none": None,
        "a": ["a"],
        "b": [{"name": "b"}],
        "a at a half": ["a=0.5"],
        "a and b": ["a=0.7", {"path": files["b"], "weight": 0.5}],
        "a backwards": ["a=-1"],
        "a at zero": ["a=0"],
        "empty": [],
    }

    def loaded():
        generator = opened(folder, precision=precision, batching_max_size=2)
        for name, path in files.items():
            generator.pipeline.load_lora_adapter(path, name)
        return generator

    alone = {}
    for name, lora in requests.items():
        with loaded() as generator:
            alone[name] = picture(generator, lora=lora)
    with opened(folder, precision=precision, batching_max_size=2) as generator:
        base = picture(generator)
    assert torch.equal(alone["none"], base)
    assert torch.equal(alone["empty"], base)
    assert torch.equal(alone["a at zero"], base)
    moving = ["none", "a", "b", "a at a half", "a and b", "a backwards"]
    for index, name in enumerate(moving):
        assert all(differs(alone[name], alone[other]) for other in moving[:index]), name
    order = ["a", "none", "b", "a at a half", "none", "a and b", "a", "a at zero", "a backwards",
             "empty", "none"]  # fmt: skip
    with loaded() as generator:
        weights = [p.clone() for p in generator.pipeline.get_module("transformer").parameters()]
        for name in order:
            assert torch.equal(picture(generator, lora=requests[name]), alone[name]), name
        after = generator.pipeline.get_module("transformer").parameters()
        assert all(torch.equal(one, other) for one, other in zip(weights, after, strict=True))


def test_a_request_replaces_what_is_in_force_and_gives_it_back(folder, files):
    with opened(folder) as generator:
        base = picture(generator)
        generator.set_lora("a", files["a"], merge_mode="merge")
        standing = picture(generator)
        assert differs(standing, base)
        assert differs(picture(generator, lora=[{"path": files["b"]}]), standing)
        assert torch.equal(picture(generator, lora=[]), base)
        assert torch.equal(picture(generator), standing)
        assert generator.list_loras()["active"]["transformer"][0]["nickname"] == "a"
        generator.unset_lora()
        assert torch.equal(picture(generator), base)
        with pytest.raises(InvalidArgument, match="unload it first"):
            generator.set_lora("a", files["b"])
        generator.unload_lora("a")
        generator.set_lora("a", files["b"])
        assert differs(picture(generator), base)
        assert generator.set_lora([]) == ()
        assert torch.equal(picture(generator), base)


def test_only_the_scale_changes(folder, files):
    with opened(folder) as generator:
        base = picture(generator)
        seen = {}
        for strength in (0.0, 0.5, 1.0, 0.5, -1.0, 0.0):
            generator.set_lora("a", files["a"], strength=strength)
            found = picture(generator)
            assert torch.equal(seen.setdefault(strength, found), found)
            assert strength == 0 or differs(found, base)
        assert torch.equal(seen[0.0], base)
        assert differs(seen[0.5], seen[1.0])
        assert differs(seen[1.0], seen[-1.0])


def test_start_up_adapters_are_in_force_and_told(folder, files):
    with opened(folder, lora_path=files["a"], lora_scale=0.5) as generator:
        started = picture(generator)
        assert "lora 'default'" in generator.notes[-1]
        generator.unset_lora()
        base = picture(generator)
        assert differs(started, base)
        generator.set_lora("default", strength=0.5)
        assert torch.equal(picture(generator), started)
    paths, names = (files["a"], files["b"]), ("a", "b")
    with opened(folder, lora_path=paths, lora_nickname=names, lora_scale=0) as generator:
        assert torch.equal(picture(generator), base)
        assert differs(picture(generator, lora=["b"]), base)


def test_merge_and_unmerge_by_call(folder, files):
    with opened(folder) as generator:
        base = picture(generator)
        generator.set_lora("a", files["a"], merge_mode="dynamic")
        live = picture(generator)
        generator.merge_lora_weights()
        merged = picture(generator)
        assert not differs(merged, live)
        generator.unmerge_lora_weights()
        assert torch.equal(picture(generator), base)
        generator.merge_lora_weights()
        assert torch.equal(picture(generator), merged)


def test_leftovers_are_a_warning_of_the_result_and_the_choice_is_in_its_settings(
    folder, files, tmp_path
):
    with opened(folder) as generator:
        adapter = diffusers_adapter(generator.pipeline.get_module("transformer"), 1)
        adapter.tensors["transformer.new.lora_A.weight"] = torch.ones(2, 2)
        path = adapter.save(tmp_path / "x.safetensors")
        result = generator.generate(prompt="a fox", lora=[{"path": path, "weight": 2}], **SMALL)
        assert "1 tensors name no module of this pipeline" in result.warnings[0]
        assert result.parameters["lora"] == [{"path": str(path), "weight": 2.0}]
        result.save(tmp_path / "x.png")


def test_a_file_that_changed_is_read_again(folder, files, tmp_path):
    with opened(folder) as generator:
        model = generator.pipeline.get_module("transformer")
        path = diffusers_adapter(model, 1).save(tmp_path / "x.safetensors")
        first = picture(generator, lora=[{"path": path}])
        diffusers_adapter(model, 2, rank=5).save(path)
        assert differs(picture(generator, lora=[{"path": path}]), first)


def test_requests_are_refused_before_weights_load(folder, tmp_path):
    with opened(folder) as generator:
        with pytest.raises(InvalidRequest, match="None is loaded"):
            picture(generator, lora=["ink"])
        with pytest.raises(CheckpointError, match="does not exist"):
            picture(generator, lora=[str(tmp_path / "x.safetensors")])
        picture(generator)
    with pytest.raises(CheckpointError, match="does not exist"):
        opened(folder, lora_path=str(tmp_path / "x.safetensors"))


def test_the_command_line_knows_all_names_before_weights_load(folder, files):
    args = ServerArgs.from_flat(model_path=str(folder), device="cpu", lora_path=files["a"])
    model = ModelDescription.find(args)
    model.check_adapter_names(model.sampling_params({"lora": ["default=0.5", files["b"]]}))
    with pytest.raises(InvalidRequest, match="Loaded: default"):
        model.check_adapter_names(model.sampling_params({"lora": ["ink"]}))


def test_pipelines_without_adapters_say_so(folder, files):
    class Bare(ComposedPipelineBase):
        pipeline_name = "Bare"

    with opened(folder) as generator:
        model = generator._worker.model
    info = dataclasses.replace(model.info, pipeline_cls=Bare)
    bare = dataclasses.replace(model, info=info)
    assert isinstance(bare, ModelDescription)
    bare.admit(bare.sampling_params({"prompt": "a fox", "lora": [], **SMALL}))
    with pytest.raises(InvalidRequest, match="Bare takes no LoRA adapters"):
        bare.admit(bare.sampling_params({"prompt": "a fox", "lora": ["a"], **SMALL}))
    worker = object.__new__(Worker)
    worker.pipeline = object.__new__(type("Whole", (Bare,), {"create_pipeline_stages": None}))
    with pytest.raises(UserError, match="Whole takes no LoRA adapters"):
        _ = worker.lora_pipeline


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"lora_path": ("a", "b")}, "has 1 names for 2 paths"),
        ({"lora_path": ("a", "b"), "lora_nickname": ("x", "x")}, "must differ"),
        ({"lora_path": "a", "lora_scale": (1.0, 2.0)}, "has 2 weights for 1 paths"),
        ({"lora_path": " "}, "must not be blank"),
        ({"lora_path": "a", "lora_merge_mode": "fuse"}, "choose one of"),
    ],
)
def test_start_up_arguments_that_do_not_fit_are_refused(folder, arguments, problem):
    with pytest.raises(InvalidArgument, match=problem):
        opened(folder, **arguments)
