"""The Diffusers backend behind the Python door, beside direct calls of Diffusers."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import warnings

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.registry import get_model_info
from sglang.multimodal_gen.runtime.utils.errors import (
    Cancelled,
    CheckpointError,
    InternalError,
    InvalidArgument,
    InvalidRequest,
    ModelNotFound,
    NonFiniteOutput,
)
from sglang.multimodal_gen.runtime.utils.image_file import read_metadata

SMALL = {"prompt": "a red fox", "height": 16, "width": 24, "num_inference_steps": 3}


@pytest.fixture
def opened(tiny):
    generators = []

    def open_it(name, **arguments):
        generator = DiffGenerator.from_pretrained(str(tiny(name)), device="cpu", **arguments)
        generators.append(generator)
        return generator

    yield open_it
    for generator in generators:
        generator.close()


@pytest.fixture
def unet(opened):
    return opened("unet")


def direct(folder, seed, **arguments):
    """A picture as a user of Diffusers makes it: uint8 [H, W, 3]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
        pipeline.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(seed)
        (image,) = pipeline(generator=generator, **arguments).images
    return np.asarray(image)


CASES = {
    "unet": ("unet", SMALL | {"guidance_scale": 5.0, "negative_prompt": "blue"}, {}),
    "unet, its own defaults": ("unet", {"prompt": "a red fox", "num_inference_steps": 2}, {}),
    "unet, noise in every step": ("unet-ancestral", SMALL, {}),
    "unet, further arguments": ("unet", SMALL, {"guidance_rescale": 0.7}),
    "transformer": ("dit", SMALL, {"use_resolution_binning": False}),
    "no text": ("unconditional", {"num_inference_steps": 3}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_picture_is_bit_for_bit_that_of_a_direct_call(opened, tiny, case):
    name, values, extra = CASES[case]
    expected = direct(tiny(name), 7, **values, **extra)
    generator = opened(name)
    assert generator.notes[-1].startswith("backend diffusers: no native family serves")
    result = generator.generate(seed=7, diffusers_kwargs=extra or None, **values)
    assert expected.std() > 20
    assert (result[0].array == expected).all()
    other = generator.generate(seed=8, diffusers_kwargs=extra or None, **values)
    assert (other[0].array != expected).any()
    assert result.backend == "diffusers"
    assert result[0].seed == 7
    assert list(result.timings) == ["input_validation_stage", "diffusers_execution_stage"]
    assert result.load_seconds > 0
    assert result.peak_memory_mb > 0
    assert result.parameters["num_inference_steps"] == values["num_inference_steps"]
    assert "guidance_scale" in values or "guidance_scale" not in result.parameters


@pytest.mark.parametrize(
    "values",
    [
        {"guidance_scale": 3.0},
        {"guidance_scale": 2.0, "true_cfg_scale": 3.0, "negative_prompt": "blue"},
    ],
)
def test_both_backends_make_the_same_picture_of_a_native_family(opened, values):
    common = {"height": 32, "width": 48, "max_sequence_length": 16, "num_inference_steps": 3}
    values = {"prompt": ["a red fox", "an owl"], "seed": 5, **common, **values}
    native = opened("native").generate(values)
    other = opened("native", backend="diffusers").generate(values)
    assert (native.backend, other.backend) == ("sglang", "diffusers")
    for ours, theirs in zip(native, other, strict=True):
        assert ours.array.std() > 20
        assert abs(ours.array.astype(int) - theirs.array.astype(int)).max() <= 2
        assert (ours.prompt, ours.seed) == (theirs.prompt, theirs.seed)


def test_requests_in_a_row_do_not_influence_each_other(unet):
    torch.manual_seed(99)
    before = torch.get_rng_state()
    first = unet.generate(seed=1, **SMALL)
    unet.generate(seed=2, **(SMALL | {"num_inference_steps": 5, "guidance_scale": 2.0}))
    with pytest.raises(InvalidRequest):
        unet.generate(seed=1, **(SMALL | {"height": 15}))
    extra = {"cross_attention_kwargs": {"scale": 1.0}, "guidance_rescale": 0.5}
    kept = json.dumps(extra)
    unet.generate(seed=3, diffusers_kwargs=extra, **SMALL)
    assert json.dumps(extra) == kept
    again = unet.generate(seed=1, **SMALL)
    assert (first[0].array == again[0].array).all()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_pipelines_own_scheduler_is_never_touched(unet):
    pipeline = unet.pipeline.get_module("pipeline")
    scheduler = pipeline.scheduler
    assert scheduler.num_inference_steps is None
    unet.generate(seed=1, **SMALL)
    with pytest.raises(InvalidRequest):
        unet.generate(seed=1, **(SMALL | {"height": 15}))
    assert pipeline.scheduler is scheduler
    assert scheduler.num_inference_steps is None


def test_what_draws_from_the_global_random_state_heeds_the_seed_too(unet):
    unet.pipeline.get_module("unet").register_forward_pre_hook(
        lambda module, args: (args[0] + torch.randn_like(args[0]), *args[1:])
    )
    pictures = []
    for state in (11, 12):  # whatever the caller's own random state is
        torch.manual_seed(state)
        pictures.append(unet.generate(seed=1, **SMALL)[0].array)
    assert (pictures[0] == pictures[1]).all()


def test_images_of_a_batch_are_those_made_alone(opened):
    generator = opened("unet-ancestral", batching_max_size=3)
    calls = []
    generator.pipeline.get_module("unet").register_forward_pre_hook(
        lambda module, args: calls.append(len(args[0]))
    )
    values = SMALL | {"negative_prompt": "blue", "prompt": ["a red fox", "an owl"]}
    together = generator.generate(seed=4, num_outputs_per_prompt=2, **values)
    assert set(calls) == {6, 2}, "three images with guidance, then one"
    assert [image.seed for image in together] == [4, 5, 6, 7]
    for image in together:
        alone = generator.generate(seed=image.seed, **(values | {"prompt": image.prompt}))
        assert abs(alone[0].array.astype(int) - image.array.astype(int)).max() <= 1
    assert len({image.array.tobytes() for image in together}) == 4


def test_pictures_without_text_and_from_images_come_one_by_one(opened, tiny, tmp_path):
    pictures = opened("unconditional").generate(seed=1, num_outputs_per_prompt=2,
                                                num_inference_steps=2)  # fmt: skip
    assert len({image.array.tobytes() for image in pictures}) == 2
    path = tmp_path / "in.png"
    Image.linear_gradient("L").convert("RGB").resize((24, 16)).save(path)
    values = {"prompt": "a red fox", "num_inference_steps": 4}
    made = opened("unet-img2img").generate(
        seed=3, image_path=str(path), num_outputs_per_prompt=2,
        diffusers_kwargs={"strength": 0.5}, **values
    )  # fmt: skip
    assert made.parameters["task_type"] == "TI2I"
    for image in made:
        with Image.open(path) as given:
            expected = direct(tiny("unet-img2img"), image.seed, image=given.convert("RGB"),
                              strength=0.5, **values)  # fmt: skip
        assert (image.array == expected).all()


REFUSED = [
    ({"true_cfg_scale": 3.0}, "true_cfg_scale=3.0: .* takes no argument 'true_cfg_scale'"),
    ({"max_sequence_length": 8}, "takes no argument 'max_sequence_length'"),
    ({"image_path": "x.png"}, "image_path"),
    ({"diffusers_kwargs": {"guidance_rescal": 0.5}}, "Did you mean 'guidance_rescale'"),
    ({"diffusers_kwargs": {"height": 8}}, "set the sampling field height"),
    ({"diffusers_kwargs": {"generator": None}}, "set the sampling field seed"),
    ({"diffusers_kwargs": {"output_type": "pil"}}, "the runtime sets this one"),
    ({"diffusers_kwargs": ["eta"]}, "must map argument names"),
    ({"guidance_scal": 9}, "Did you mean 'guidance_scale'"),
    ({"height": 0}, "height=0: must be at least 1"),
    ({"width": -8}, "width=-8: must be at least 1"),
    ({"height": 15}, "height=15: refused by .*divisible by 8"),
    ({"height": 800_000, "width": 800_000}, "max_pixels"),
    ({"prompt": None}, "prompt=None: is missing"),
    ({"prompt": ["a", " "]}, "is empty"),
    ({"num_inference_steps": 0}, "num_inference_steps=0"),
    ({"task_type": "T2V"}, "serves T2I"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_the_pipeline_does_not_take_is_refused_and_never_dropped(unet, change, message):
    with pytest.raises(InvalidRequest, match=message):
        unet.generate(**(SMALL | change))


@pytest.mark.parametrize(
    "extra", [{"clip_skip": "a"}, {"clip_skip": 100, "eta": 0.0}, {"cross_attention_kwargs": 5}]
)
def test_a_value_of_a_wrong_kind_is_the_callers_mistake_and_the_log_has_the_traceback(
    unet, extra, caplog
):
    before = unet.generate(seed=1, **SMALL)
    with pytest.raises(InvalidRequest, match=r"diffusers_kwargs=.*passed through") as caught:
        unet.generate(**SMALL, diffusers_kwargs=extra)
    assert ", ".join(extra) in str(caught.value)
    (record,) = [r for r in caplog.records if "failed on its arguments" in r.message]
    assert record.exc_info is not None
    after = unet.generate(seed=1, **SMALL)
    assert (after[0].array == before[0].array).all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": "a"}, "takes no argument 'prompt'"),
        ({"height": 16}, "takes no argument 'height'"),
    ],
)
def test_a_pipeline_without_text_refuses_text(opened, values, message):
    with pytest.raises(InvalidRequest, match=message):
        opened("unconditional").generate(**values)


def test_a_checkpoints_own_defaults_are_passed_and_the_request_wins(tiny, tmp_path):
    copy = tmp_path / "fine-tune"
    shutil.copytree(tiny("unet"), copy)
    defaults = {"height": 16, "width": 24, "num_inference_steps": 3, "guidance_scale": 9.0}
    (copy / "sampling_params.json").write_text(json.dumps(defaults))
    with DiffGenerator.from_pretrained(str(copy), device="cpu") as generator:
        calls = seen_calls(generator)
        result = generator.generate(prompt="a red fox", seed=1)
        assert result.parameters["guidance_scale"] == 9.0
        generator.generate(prompt="a red fox", seed=1, guidance_scale=0)
    assert [call["guidance_scale"] for call in calls] == [9.0, 0]
    assert "negative_prompt" not in calls[0], "what nobody set is the pipeline's own"


def seen_calls(generator):
    stage, calls = generator.pipeline.get_stage("diffusers_execution_stage"), []
    pipeline = stage.pipeline

    class Watched:
        components = pipeline.components

        def __call__(self, **arguments):
            calls.append(arguments)
            return pipeline(**arguments)

    stage.pipeline = Watched()
    return calls


def test_progress_and_cancelling_and_metadata(unet, tmp_path):
    events, stop = [], threading.Event()
    result = unet.generate(seed=1, progress=events.append, num_outputs_per_prompt=5, **SMALL)
    steps = [e for e in events if e.phase == "denoise"]
    assert [e.done for e in steps] == list(range(1, steps[-1].total + 1))
    assert len({e.total for e in steps}) == 1
    assert [(e.done, e.total) for e in events if e.phase == "decode"] == [(4, 5), (5, 5)]

    def cancel(event):
        stop.set()

    with pytest.raises(Cancelled):
        unet.generate(seed=1, progress=cancel, cancelled=stop, **SMALL)

    def fail(event):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        unet.generate(seed=1, progress=fail, **SMALL)
    again = unet.generate(seed=1, **SMALL)
    assert abs(again[0].array.astype(int) - result[0].array.astype(int)).max() <= 1
    (path,) = again.save(tmp_path / "a.png")
    found = read_metadata(path)
    assert (found.prompt, found.seed) == ("a red fox", 1)
    assert found.parameters["num_inference_steps"] == 3


def test_progress_comes_by_whatever_the_pipeline_has(opened):
    def heard(name, **values):
        events = []
        opened(name).generate(seed=1, progress=events.append, **values)
        return [(e.done, e.total) for e in events if e.phase == "denoise"]

    plain = {"diffusers_kwargs": {"use_resolution_binning": False}}
    assert heard("dit", **SMALL, **plain) == [(1, 3), (2, 3), (3, 3)]
    assert heard("unconditional", num_inference_steps=3, num_outputs_per_prompt=2) == [(1, 1)]


@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR])
def test_what_the_library_says_is_a_warning_of_the_result(unet, capfd, level, monkeypatch):
    # Whoever quiets the libraries' logs (any code in this process) must not lose it.
    for library in ("diffusers", "transformers"):
        monkeypatch.setattr(logging.getLogger(library), "level", level)
        logging.getLogger(library).manager._clear_cache()
    result = unet.generate(seed=1, **(SMALL | {"prompt": "fox " * 200}))
    assert any("truncated" in warning for warning in result.warnings)
    assert not unet.generate(seed=1, **SMALL).warnings
    assert "truncated" not in capfd.readouterr().err
    for name in ("diffusers", "transformers"):
        assert not [h for h in logging.getLogger(name).handlers if "Collector" in type(h).__name__]


def test_auto_prefers_the_native_family_and_says_so_when_there_is_none(tiny):
    assert get_model_info(str(tiny("native"))).backend == "sglang"
    assert get_model_info(str(tiny("native")), backend="diffusers").backend == "diffusers"
    info = get_model_info(str(tiny("unet")))
    assert info.backend == "diffusers"
    assert len(info.notes) == 1
    with pytest.raises(ModelNotFound, match="--backend diffusers"):
        get_model_info(str(tiny("unet")), backend="sglang")


def test_a_native_family_that_fails_to_load_does_not_fall_back(tiny, tmp_path):
    copy = tmp_path / "broken"
    shutil.copytree(tiny("native"), copy)
    config = json.loads((copy / "transformer/config.json").read_text())
    config["num_layers"] = 1
    (copy / "transformer/config.json").write_text(json.dumps(config))
    for backend in ("auto", "sglang"):
        with pytest.raises(CheckpointError, match="transformer"):
            DiffGenerator.from_pretrained(str(copy), device="cpu", backend=backend)


def altered(tiny, tmp_path, change):
    copy = tmp_path / "altered"
    shutil.copytree(tiny("unet"), copy)
    change(copy)
    return copy


def rename_class(folder, name="StabelDiffusionPipeline"):
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": name}))


def foreign_component(folder):
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"unet": ["my_unet", "Net"]}))
    (folder / "unet/my_unet.py").write_text("raise SystemExit('code of a checkpoint was run')")


def only_pickle(folder):
    path = folder / "unet/diffusion_pytorch_model.safetensors"
    torch.save(load_file(path), folder / "unet/diffusion_pytorch_model.bin")
    path.unlink()


def drop_weight(part):
    def change(folder):
        (path,) = (folder / part).glob("*.safetensors")
        tensors = load_file(path)
        tensors.pop(sorted(tensors)[3])
        save_file(tensors, path, {"format": "pt"})

    return change


def truncate(folder):
    path = folder / "vae/diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (rename_class, ModelNotFound, "Diffusers has no pipeline of that name either"),
        (foreign_component, CheckpointError, "'unet' is Net of 'my_unet'.*no code of a checkpoint"),
        (only_pickle, CheckpointError, "safetensors"),
        (drop_weight("unet"), CheckpointError, "lacks weights|cannot load"),
        (drop_weight("text_encoder"), CheckpointError, "lacks weights|cannot load"),
        (truncate, CheckpointError, "cannot load"),
        (lambda folder: shutil.rmtree(folder / "vae"), CheckpointError, "'vae' has no folder"),
        (lambda f: rename_class(f, "TextToVideoSDPipeline"), ModelNotFound, "makes video or sound"),
    ],
)
def test_a_bad_checkpoint_is_an_error_in_one_paragraph(tiny, tmp_path, change, error, message):
    with pytest.raises(error, match=message):
        DiffGenerator.from_pretrained(str(altered(tiny, tmp_path, change)), device="cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"component_paths": {"vae": "."}}, "one whole folder"),
        ({"component_weights_paths": {"vae": "."}}, r"component_weights_paths\.vae=.*whole folder"),
        (
            {"backend": "diffusers", "pipeline_class_name": "FluxPipeline"},
            "pipeline_class_name=.*Leave one",
        ),
        ({"backend": "diffusers", "model_id": "org/x"}, "model_id=.*Leave one"),
        ({"component_precisions": {"vea": "fp32"}}, "Did you mean 'vae'"),
        ({"vae_cpu_offload": True}, "needs an accelerator"),
        ({"layerwise_offload_components": ["all"]}, "use --cpu-offload-components all"),
        ({"pipeline_config": {"vae_precision": "fp32"}}, "has no effect"),
        ({"backend": "difusers"}, "Did you mean 'diffusers'"),
    ],
)
def test_arguments_that_it_cannot_honour_are_refused(opened, arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        opened("unet", **arguments)


def test_precisions_reach_the_components(opened):
    generator = opened("unet", precision="bf16", component_precisions={"vae": "fp32"})
    dtypes = {
        name: next(generator.pipeline.get_module(name).parameters()).dtype
        for name in ("unet", "vae", "text_encoder")
    }
    assert dtypes == {
        "unet": torch.bfloat16,
        "vae": torch.float32,
        "text_encoder": torch.bfloat16,
    }


def test_a_failure_inside_is_this_requests_alone_and_nans_are_no_picture(unet):
    before = unet.generate(seed=1, **SMALL)

    def fail(*_):
        raise RuntimeError("boom")

    hook = unet.pipeline.get_module("unet").register_forward_pre_hook(fail)
    with pytest.raises(InternalError, match="boom"):
        unet.generate(seed=1, **SMALL)
    hook.remove()
    overflow = unet.pipeline.get_module("vae").decoder.register_forward_hook(
        lambda module, inputs, output: output * torch.nan
    )
    with pytest.raises(NonFiniteOutput, match="precision fp32"):
        unet.generate(seed=1, **SMALL)
    overflow.remove()
    assert (unet.generate(seed=1, **SMALL)[0].array == before[0].array).all()
