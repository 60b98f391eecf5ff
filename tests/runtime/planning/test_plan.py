"""Plans against what was measured on a GPU, and the command that prints them."""

from __future__ import annotations

import json
import shutil

import pytest

from full_size_flux import write_flux_dev
from runtime.conftest import folder as folder
from sglang.multimodal_gen.runtime.entrypoints.cli.main import main
from sglang.multimodal_gen.runtime.entrypoints.diffusion_generator import DiffGenerator
from sglang.multimodal_gen.runtime.planning.estimate import estimate
from sglang.multimodal_gen.runtime.planning.gpus import gpu_named
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, InvalidArgument, OutOfMemory

GIB = 1 << 30


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    return write_flux_dev(tmp_path_factory.mktemp("flux"))


def plan(folder, gpu="h200", host=64.0, values=None, **flags):
    args = ServerArgs.from_flat(model_path=str(folder), **flags)
    return estimate(args, values or {}, gpu_named(gpu), host)


def stage(made, name):
    return next(s for s in made.stages if s.name == name)


@pytest.mark.slow
def test_flux_on_an_h200_is_planned_as_it_was_measured(flux):
    """benchmarks/README.md, one H200: 122.4 ms a step, 22.64 GiB with the denoiser alone."""
    made = plan(flux)
    weights = {component.name: component.nbytes / GIB for component in made.components}
    assert weights["transformer"] == pytest.approx(22.17, abs=0.01)
    assert made.step_seconds == pytest.approx(0.1224, rel=0.1)
    loop = stage(made, "denoising_stage")
    denoiser = weights["transformer"] + loop.activation_bytes / GIB
    assert denoiser == pytest.approx(22.64, rel=0.02)
    assert made.fits
    assert made.seconds > 28 * made.step_seconds
    streamed = plan(flux, layerwise_offload_components=["all"])
    # benchmarks/README.md: everything streamed, 2.71 GiB (before decoding), steps of 427.9 ms.
    assert streamed.peak_bytes / GIB == pytest.approx(2.706, rel=0.1)
    assert stage(streamed, "text_encoding_stage").bytes == streamed.peak_bytes
    assert streamed.step_seconds == pytest.approx(0.4279, rel=0.1)


@pytest.mark.slow
def test_decoding_is_planned_as_it_was_measured(flux):
    """docs/performance.md, one H200: the peak of decoding in bf16 on channels-last maps, weights of
    the VAE included. (It was 2.58 on others.)
    """
    made = plan(flux, values={"height": 1024, "width": 1024})
    (vae,) = [component for component in made.components if component.name == "vae"]
    planned = vae.nbytes + stage(made, "decoding_stage").activation_bytes
    assert planned / GIB == pytest.approx(1.571, rel=0.02)


def test_rings_and_what_comes_next_are_as_large_as_planned():
    """The streams' own count of a request's device memory, on the CPU."""
    flags = {"layerwise_offload_components": ["all"], "precision": "fp32"}
    made = plan("demo", **flags)
    with DiffGenerator.from_pretrained("demo", device="cpu", **flags) as generator:
        generator.generate(prompt="a red circle", seed=1, num_inference_steps=1)
        parts = generator.pipeline._offloaded
        lanes = {id(part.lane): part.lane for part in parts.values()}
    (lane,) = lanes.values()
    assert lane.held == 0
    assert lane.peak > max(part.device_bytes for part in parts.values()), "two of them met"
    assert max(s.weight_bytes for s in made.stages) == pytest.approx(lane.peak, rel=0.02)


@pytest.mark.slow
def test_a_small_gpu_gets_a_plan_that_fits_and_costs_time(flux):
    large, small = plan(flux), plan(flux, "rtx-4090")
    assert small.fits
    assert small.peak_bytes < large.peak_bytes
    assert small.seconds > 2 * large.seconds
    assert {component.place for component in small.components} != {"resident"}
    assert any("memory:" in note for note in small.notes)
    wide = plan(flux, values={"height": 2048, "width": 2048})
    assert wide.step_seconds > 4 * large.step_seconds
    name = "denoising_stage"
    more, less = stage(wide, name).activation_bytes, stage(large, name).activation_bytes
    assert more > 3 * less
    with pytest.raises(OutOfMemory):
        plan(flux, "l4", host=2.0)


def test_guidance_costs_a_second_forward_and_images_add_up():
    one = plan("demo", values={"true_cfg_scale": 1.0})
    two = plan("demo", values={"negative_prompt": "red", "true_cfg_scale": 2.0})
    four = plan("demo", values={"true_cfg_scale": 1.0, "num_outputs_per_prompt": 4})
    name = "denoising_stage"
    operations = [stage(made, name).tera_operations for made in (one, two, four)]
    assert operations[1] == pytest.approx(2 * operations[0], rel=0.02)
    assert operations[2] == pytest.approx(4 * operations[0], rel=0.02)
    more, less = (
        stage(made, name).activation_bytes - made.gpu.workspace_bytes for made in (four, one)
    )
    assert more > 2 * less


def test_the_command_prints_a_plan(capsys):
    assert main(["plan", "--gpu", "NVIDIA H100"]) == 0
    text = capsys.readouterr().out
    assert "denoising_stage" in text
    assert "on one h100" in text
    assert main(["plan", "demo", "--json", "--height", "128", "--width", "64"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["settings"]["height"] == 128
    assert told["peak_bytes"] == max(s["bytes"] for s in told["stages"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--gpu", "h2000"], "Did you mean 'h200'"),
        (["--num-gpus", "4", "--tp-size", "2"], "num_gpus=4: plans are made for one GPU so far"),
        (["--backend", "diffusers"], "backend='diffusers': plans are made of native"),
        (["--gpu", "rtx-3090", "--quantization", "fp8"], "this GPU has 8.6"),
        (["--gpu", "rtx-3090", "--attention-backend", "fa3"], "this GPU has 8.6"),
        (["--attention-backend", "fa2", "--precision", "fp32"], "computes in float32"),
        (["--enable-cuda-graph", "--layerwise-offload-components", "all"], "a graph needs them"),
        (["--height", "100"], "height"),
        (["--host-memory-gib", "-1"], "must be above 0"),
        (["--model-path", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_bad_input_is_one_sentence(words, problem, capsys):
    assert main(["plan", *words]) == 2
    assert problem in capsys.readouterr().err


def test_what_this_gpu_can_do_is_planned_without_its_packages():
    made = plan("demo", attention_backend="fa3", enable_cuda_graph=True, precision="bf16")
    assert made.fits
    told = " ".join(made.notes)
    assert "attention is counted at one rate" in told
    assert "recordings" in told


def test_a_checkpoint_that_lacks_weights_is_refused_as_loading_refuses_it(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    file = broken / "transformer" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_layers": config["num_layers"] + 1}))
    with pytest.raises(CheckpointError, match="Missing") as planned:
        plan(broken)
    with pytest.raises(CheckpointError) as loaded:
        DiffGenerator.from_pretrained(str(broken), device="cpu")
    assert str(planned.value) == str(loaded.value)


def test_names_of_gpus():
    assert gpu_named("RTX 4090").name == gpu_named("rtx_4090").name == "rtx-4090"
    with pytest.raises(InvalidArgument, match="Known: h200"):
        gpu_named("abacus")
