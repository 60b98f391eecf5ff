import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sglang.multimodal_gen.runtime.entrypoints.cli import generate
from sglang.multimodal_gen.runtime.utils.image_file import read_metadata


def test_a_picture_is_written_and_its_path_printed(generator, sglang):
    outcome = sglang("generate", "--prompt", "a red circle", "--seed", "7")
    assert outcome.code == 0
    path = Path(outcome.out.rstrip("\n"))
    assert re.fullmatch(r"outputs/\d{8}-\d{6}-7\.png", str(path))
    assert np.asarray(Image.open(path)).shape == (8, 12, 3)
    assert generator.request == {"prompt": ["a red circle"], "seed": 7}
    assert (generator.opened, generator.closed) == (1, 1)


def test_standard_error_tells_progress_choices_warnings_and_times(generator, sglang):
    generator.warnings = ("cut [here]", "cut [here]")
    outcome = sglang("generate", "--prompt", "x")
    lines = outcome.err.splitlines()
    assert lines[0].startswith("load: 9.0/9.0 MB")
    assert lines[1] == "note: device cpu: no usable CUDA GPU is visible"
    assert lines[2].startswith("denoising: 4/4")
    assert lines.count("warning: cut [here]") == 1
    table = [line.split() for line in lines[4:]]
    assert table == [
        ["load", "0.75", "s"],
        ["text_encoding_stage", "0.25", "s"],
        ["denoising_stage", "1.50", "s"],
        ["total", "2.50", "s"],
        ["peak", "memory", "322", "MiB"],
    ]


def test_quiet_leaves_warnings_alone(generator, sglang):
    generator.warnings = ("cut",)
    outcome = sglang("generate", "--prompt", "x", "--quiet")
    assert outcome.err == "warning: cut\n"
    assert outcome.out.startswith("outputs/")


def test_json_is_one_line_and_the_only_output(generator, sglang):
    generator.warnings = ("cut",)
    outcome = sglang(
        "generate", "--prompt", "a café", "b", "--seed", "1", "--json", "--num-inference-steps=3"
    )
    assert outcome.out.count("\n") == 1
    summary = json.loads(outcome.out)
    paths = [image.pop("path") for image in summary["images"]]
    assert [Path(path).exists() for path in paths] == [True, True]
    assert summary == {
        "images": [
            {"prompt": "a café", "seed": 1, "width": 12, "height": 8},
            {"prompt": "b", "seed": 2, "width": 12, "height": 8},
        ],
        "timings": {"text_encoding_stage": 0.25, "denoising_stage": 1.5},
        "load_seconds": 0.75,
        "peak_memory_mb": 321.5,
        "warnings": ["cut"],
        "model": "demo",
        "backend": "sglang",
        "parameters": {"num_inference_steps": 3},
    }
    assert "warning: cut" in outcome.err


def test_metadata_is_stored_unless_switched_off(generator, sglang):
    with_it = sglang("generate", "--prompt", "x", "--seed", "1").out.strip()
    about = read_metadata(with_it)
    assert about is not None
    assert (about.prompt, about.seed, about.model) == ("x", 1, "demo")
    assert about.parameters == {"num_inference_steps": 50}
    without = sglang("generate", "--prompt", "x", "--no-save-metadata").out.strip()
    assert read_metadata(without) is None


def test_the_same_seed_in_the_same_second_overwrites_nothing(generator, sglang):
    paths = [
        line
        for _ in range(4)
        for line in sglang("generate", "--prompt", "x", "--seed", "1", "--quiet").out.split()
    ]
    assert len(set(paths)) == 4


def test_server_arguments_reach_the_generator(generator, sglang):
    outcome = sglang(
        *("generate", "--prompt", "x", "--device", "cpu", "--batching_max_size", "2"),
        *("--component-precisions.vae", "fp32"),
    )
    assert outcome.code == 0
    assert generator.args.platform.device == "cpu"
    assert generator.args.batching.batching_max_size == 2
    assert generator.args.model.component_precisions == {"vae": "fp32"}


def test_a_bad_output_folder_is_told_before_the_model_is_loaded(generator, fails):
    Path("file").write_text("in the way")
    message = fails("generate", "--prompt", "x", "--output-path", "file")
    assert message.startswith("cannot use the output folder 'file': ")
    assert generator.opened == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "there is no prompt. Give --prompt TEXT, or --prompt-file FILE"),
        (["--prompt", ""], "prompt='': is empty"),
        (["--prompt", "x", "--prompt-file", "f"], "the command line has both"),
        (
            ["--prompt", "x", "--guidence-scale", "3"],
            "unrecognized argument --guidence-scale. Did you mean '--guidance-scale'?",
        ),
        (["--prompt", "x", "--device", "gpu"], "--device='gpu': choose one of auto, cpu, cuda."),
        (["--prompt", "x", "--batching-max-size", "0"], "batching_max_size=0: must be at least 1"),
        (["--prompt", "x", "--height", "-16"], "height=-16: must be at least 1"),
        (["--prompt", "x", "--num-inference-steps", "0"], "num_inference_steps=0: must be"),
        (["--prompt", "x", "--num-inference-steps", "1.5"], "--num-inference-steps='1.5': must"),
        (["--prompt", "x", "--seed", "-5"], "seed=-5: must lie in"),
        (["--prompt", "x", "--model-path", "missing"], "model_path='missing' does not exist."),
        (["--prompt", "x", "--config", "missing.yaml"], "cannot read the config file"),
        (["--prompt", "x", "--output-path", "a.gif"], "cannot write 'a.gif': '.gif' is no image"),
    ],
)
def test_a_mistake_is_one_paragraph_before_anything_loads(generator, fails, argv, message):
    assert fails("generate", *argv).startswith(message)
    assert generator.opened == 0


def test_a_disk_that_fills_up_is_told(generator, fails, monkeypatch):
    import errno
    import os

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real = generator.generate_batches

    def generate_then_fill(**kwargs):
        for part in real(**kwargs):
            monkeypatch.setattr(os, "fsync", full)
            yield part

    monkeypatch.setattr(generator, "generate_batches", generate_then_fill)
    assert "No space left on device. Free some space" in fails("generate", "--prompt=x", "--quiet")
    assert list(Path("outputs").iterdir()) == []


@pytest.mark.slow
def test_pictures_are_written_before_they_are_told_and_a_closed_pipe_loses_none(
    generator, tmp_path
):
    import subprocess
    import sys

    sglang = Path(sys.executable).with_name("sglang")
    command = (
        f"{sglang} generate --prompt x --num-outputs-per-prompt 3 --num-inference-steps 1 "
        f"--output-path {tmp_path / 'piped'} --quiet"
    )
    done = subprocess.run(
        ["bash", "-c", f"{command} | true; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 141)
    assert len(list((tmp_path / "piped").glob("*.png"))) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirection", "code"), [(">/dev/full", 2), (">&-", 0), ("2>&-", 0), ("2>/dev/null", 0)]
)
def test_streams_that_cannot_be_written_lose_no_picture(tmp_path, redirection, code):
    import subprocess
    import sys

    sglang = Path(sys.executable).with_name("sglang")
    folder = tmp_path / "out"
    done = subprocess.run(
        [
            "bash",
            "-c",
            f"{sglang} generate --prompt x --num-inference-steps 1 --output-path {folder} "
            f"{redirection}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == code
    assert len(list(folder.glob("*.png"))) == 1


def test_a_refused_request_leaves_no_folder(generator, fails, tmp_path):
    fails("generate", "--prompt=x", "--height", "-3", "--output-path", "new/folder")
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("path", "message"),
    [("s3://bucket/x", "is a URL"), (" ", "is blank"), ("~nobody-of-that-name/x", "home")],
)
def test_an_output_path_that_is_no_local_path_is_refused(generator, fails, path, message):
    assert message in fails("generate", "--prompt=x", "--output-path", path)
    assert generator.opened == 0


def test_adapters_of_a_request_and_of_the_server(sglang, generator):
    outcome = sglang(
        *("generate", "--prompt", "a fox", "--lora", "ink=0.5", "wash", "--seed", "1"),
        *("--lora-path", "a.safetensors", "b", "--lora-nickname", "ink", "wash"),
        *("--lora-scale", "0"),
    )
    assert outcome.code == 0, outcome
    assert generator.request["lora"] == ["ink=0.5", "wash"]
    assert generator.args.lora.lora_paths == ("a.safetensors", "b")
    assert generator.args.lora.lora_nicknames == ("ink", "wash")
    assert generator.args.lora.lora_scales == (0.0, 0.0)


def test_an_adapters_weight_must_be_a_number(fails):
    assert "lora.weight=nan: must be a finite number" in fails(
        "generate", "--prompt", "a fox", "--lora", "ink=nan"
    )


def test_a_picture_by_url_is_a_file_before_admission_looks_at_it(sglang, generator, monkeypatch):
    seen = []
    admitted = generator.open

    def open_generator(args, request, on_admitted, progress):
        seen.append(Path(request["image_path"]).read_bytes())
        return admitted(args, request, on_admitted, progress)

    monkeypatch.setattr(generate, "open_generator", open_generator)
    said = ("generate", "--model-path", "demo", "--prompt", "a", "--image-path")
    assert sglang(*said, "data:image/png;base64,YWJj").code == 0
    assert seen == [b"abc"]
    outcome = sglang(*said, "FILE:///etc/passwd")
    assert outcome.code == 2
    assert "must be https or http" in outcome.err
    assert len(seen) == 1
