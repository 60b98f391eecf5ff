"""A generator that needs no model, and families that need no registry."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sglang.multimodal_gen import GeneratedImage, GenerationResult
from sglang.multimodal_gen.configs.sample.sampling_params import ImageSamplingParams
from sglang.multimodal_gen.runtime.entrypoints.cli import generate, generate_options
from sglang.multimodal_gen.runtime.entrypoints.cli.main import main
from sglang.multimodal_gen.runtime.server_args.sections import ModelArgs
from sglang.multimodal_gen.runtime.utils.errors import ModelNotFound
from sglang.multimodal_gen.runtime.utils.progress import ProgressEvent


@dataclass
class FamilyParams(ImageSamplingParams):
    """A family with a setting of its own."""

    height: int | None = 8
    width: int | None = 12
    strength: float = 0.5


@dataclass
class PromptlessParams(ImageSamplingParams):
    prompt_optional = True


FAMILIES = {"demo": FamilyParams, "other": ImageSamplingParams, "promptless": PromptlessParams}


class FakeGenerator:
    """Records what it was asked, and makes flat pictures."""

    notes = ("device cpu: no usable CUDA GPU is visible",)
    error: BaseException | None = None
    warnings: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.args: Any = None
        self.request: dict[str, Any] = {}
        self.opened = 0
        self.closed = 0

    def open(self, args, request, on_admitted, progress) -> FakeGenerator:
        params = FAMILIES[args.model.model_path].from_values(request)
        count = max(len(params.prompts), 1) * params.num_outputs_per_prompt
        on_admitted(count, params.data_type, getattr(params, "fps", None))
        self.args, self.opened = args, self.opened + 1
        if progress is not None:
            progress(ProgressEvent("load", 9_000_000, 9_000_000, "transformer"))
        return self

    def __enter__(self) -> FakeGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed += 1

    def generate_batches(self, *, progress=None, **sampling: Any) -> Iterator[GenerationResult]:
        self.request = sampling
        if self.error is not None:
            raise self.error
        params = FAMILIES[self.args.model.model_path].from_values(sampling)
        if progress is not None:
            progress(ProgressEvent("denoise", 4, 4, "denoising"))
        prompts = [p for p in params.prompts or [""] for _ in range(params.num_outputs_per_prompt)]
        seed = params.seed if isinstance(params.seed, int) else 100
        shape = (params.height or 4, params.width or 4, 3)
        yield GenerationResult(
            images=[
                GeneratedImage(np.full(shape, seed + k, dtype=np.uint8), prompt, seed + k)
                for k, prompt in enumerate(prompts)
            ],
            parameters={"num_inference_steps": params.num_inference_steps},
            timings={"text_encoding_stage": 0.25, "denoising_stage": 1.5},
            load_seconds=0.75,
            peak_memory_mb=321.5,
            warnings=list(self.warnings),
            model=self.args.model.model_path,
        )


@dataclass
class Outcome:
    """What a shell sees of one run."""

    code: int
    out: str
    err: str


@pytest.fixture
def generator(monkeypatch, tmp_path) -> Iterator[FakeGenerator]:
    """The fake behind ``sglang generate``, which runs in an empty folder."""

    def family(model: ModelArgs) -> type[ImageSamplingParams]:
        if model.model_path not in FAMILIES:
            raise ModelNotFound(f"model_path={model.model_path!r} does not exist.")
        return FAMILIES[model.model_path]

    fake = FakeGenerator()
    monkeypatch.setattr(generate, "open_generator", fake.open)
    monkeypatch.setattr(generate_options, "sampling_params_class", family)
    monkeypatch.chdir(tmp_path)
    level = logging.getLogger("sglang").level
    yield fake
    logging.getLogger("sglang").setLevel(level)


@pytest.fixture
def sglang(capsys) -> Callable[..., Outcome]:
    """Runs the command line as a shell would."""

    def run(*argv: str) -> Outcome:
        code = main(argv)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def fails(sglang) -> Callable[..., str]:
    """Runs a command line that must be refused in one clean paragraph; returns it."""

    def run(*argv: str) -> str:
        outcome = sglang(*argv)
        assert outcome.code == 2, outcome
        assert outcome.out == ""
        assert "Traceback" not in outcome.err
        assert outcome.err.count("\n") == 1, outcome.err
        return outcome.err.removeprefix("sglang: error: ").rstrip("\n")

    return run
