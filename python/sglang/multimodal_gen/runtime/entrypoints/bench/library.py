"""The Diffusers library's side of a measurement: its own pipeline, asked for the same work."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.diffusers_backend.call_signature import (
    CallSignature,
    pipeline_class,
    signature_of,
)
from sglang.multimodal_gen.runtime.diffusers_backend.loading import (
    check_components,
    load_pipeline,
)
from sglang.multimodal_gen.runtime.entrypoints.bench.trial import (
    RuntimeSide,
    Side,
    StepClock,
    Trial,
)
from sglang.multimodal_gen.runtime.loader.component_loaders.library_classes import library_class
from sglang.multimodal_gen.runtime.loader.meta_build import build_on_meta, default_dtype
from sglang.multimodal_gen.runtime.loader.model_source import ModelSource
from sglang.multimodal_gen.runtime.loader.random_weights import fill
from sglang.multimodal_gen.runtime.loader.weights import dtype_rule
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.platforms.device import (
    peak_memory_mb,
    reset_peak_memory,
    synchronize,
)
from sglang.multimodal_gen.runtime.server_args.memory_args import MemoryArgs
from sglang.multimodal_gen.runtime.utils.component_roles import is_denoiser
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, UserError
from sglang.multimodal_gen.runtime.utils.image_file import load_input_image
from sglang.multimodal_gen.runtime.utils.precision import PRECISIONS, parse_precision
from sglang.multimodal_gen.runtime.utils.progress import ProgressEvent

THEIRS = "diffusers"
OWN_WAYS = frozenset(
    {"step_cache", "step_cache_threshold", "num_frames_round_down", "fps", "task_type"}
)
"""Settings that say how this runtime does the work, or what becomes of it after; the library has
none of them and stays the same yardstick."""
_SPOKEN_FOR = OWN_WAYS | {
    "prompt", "seed", "num_outputs_per_prompt", "image_path", "guidance_scale"
}  # fmt: skip


class LibrarySide(Side):
    """A Diffusers pipeline, called with what `call_arguments` says."""

    def __init__(
        self, pipeline: Any, arguments: Mapping[str, Any], seeds: list[int], device: str
    ) -> None:
        super().__init__()
        self.name = THEIRS
        self.pipeline = pipeline
        self.arguments = arguments
        self.seeds = seeds
        self.device = device
        self.modules = pipeline.components

    def run(self, clock: StepClock | None = None) -> Trial:
        """See `Side.run`; noise is drawn on the CPU, as this runtime draws it."""
        clock = StepClock(self.device) if clock is None else clock
        reset_peak_memory(self.device)
        synchronize(self.device)
        start = time.perf_counter()
        generators = [torch.Generator().manual_seed(seed) for seed in self.seeds]
        steps = self.arguments["num_inference_steps"]

        def heard(_pipeline: Any, step: int, _t: Any, _tensors: Any) -> dict[str, Any]:
            clock.heard(ProgressEvent("denoise", step + 1, steps, THEIRS))
            return {}

        clock.heard(ProgressEvent("denoise", 0, steps, THEIRS))
        with self.forwards() as forwards:
            self.pipeline(
                **self.arguments,
                generator=generators[0] if len(generators) == 1 else generators,
                callback_on_step_end=heard,
                output_type="np",
            )
        synchronize(self.device)
        seconds = time.perf_counter() - start
        peak = peak_memory_mb(self.device)
        counted = forwards.count / clock.steps
        return Trial(clock.intervals_ms(), seconds, {"call": seconds}, peak, counted)

    def compile(self) -> None:
        """Compile its repeated blocks, as Diffusers' documentation has it; the first calls wait.

        Raises:
            UserError: its denoiser declares none.
        """
        denoisers: list[Any] = [
            module
            for name, module in self.networks.items()
            if is_denoiser(name) and getattr(module, "_repeated_blocks", None)
        ]
        if not denoisers:
            problem = "this pipeline has no denoiser whose blocks compile"
            raise UserError(f"--reference diffusers-compiled: {problem}")
        for denoiser in denoisers:
            denoiser.compile_repeated_blocks(fullgraph=True)
        self.name = f"{THEIRS}, compiled"


def their_side(
    ours: RuntimeSide, values: Mapping[str, Any], *, random_weights: bool, compiled: bool
) -> LibrarySide:
    """The Diffusers library's pipeline on the same folder, each network in the precision that ours
    has: the same yardstick for ours in eight bits.

    Raises:
        UserError, CheckpointError: it cannot run this model.
        InvalidArgument, InvalidRequest: a setting that it does not take.
    """
    model = ours.model
    check_components(model.source)
    found = pipeline_class(model.source.class_name or "")
    params = model.sampling_params(values)
    model.admit(params)  # a prompt's template or size that the family refuses is told in its words
    arguments = call_arguments(model, params, values, signature_of(found))
    dtypes = ours.dtypes()
    if random_weights:
        pipeline = _random_pipeline(model.source, found, dtypes, model.server_args.platform.device)
    else:
        pipeline = _stored_pipeline(model, dtypes)
    first = params.seed[0] if isinstance(params.seed, list) else params.seed
    assert first is not None, "the commands set one"
    seeds = [first + number for number in range(params.num_outputs_per_prompt)]
    side = LibrarySide(pipeline, arguments, seeds, ours.device)
    if compiled:
        side.compile()
    return side


def call_arguments(
    model: ModelDescription,
    params: SamplingParams,
    asked: Mapping[str, Any],
    signature: CallSignature,
) -> dict[str, Any]:
    """The arguments of the library's call: every setting of the request that it has a parameter
    for, the family's defaults among them, so that sizes, steps and guidance are the same.

    Raises:
        InvalidArgument: a setting that was asked for and that it does not take; the sides would do
            different work.
    """
    arguments: dict[str, Any] = {"prompt": params.prompts[0]}
    for name in params.field_names():
        value = getattr(params, name)
        if name in _SPOKEN_FOR or value is None:
            continue
        if name in signature:
            arguments[name] = value
        elif asked.get(name) is not None:
            problem = f"{signature.refusal(name)}. Leave it out, or use --reference none"
            raise InvalidArgument(name, value, problem)
    config = model.config
    if config.should_use_guidance or config.dit_config.guidance_embeds:
        arguments["guidance_scale"] = params.guidance_scale
    for name in ("num_images_per_prompt", "num_videos_per_prompt"):
        if name in signature:
            arguments[name] = params.num_outputs_per_prompt
    if paths := getattr(params, "image_paths", []):
        if "image" not in signature:
            raise InvalidArgument("image_path", paths, signature.refusal("image"))
        images = [load_input_image(path) for path in paths]
        arguments["image"] = images[0] if len(images) == 1 else images
    return arguments


def _stored_pipeline(model: ModelDescription, dtypes: Mapping[str, torch.dtype]) -> Any:
    names = {parse_precision(name): name for name in PRECISIONS}
    args = model.server_args
    parts = {
        name: names[dtype] for name, dtype in dtypes.items() if name in model.source.components
    }
    theirs = dataclasses.replace(
        args.model, quantization=None, quantization_ignored_layers=(), component_precisions=parts
    )
    return load_pipeline(
        model.source, dataclasses.replace(args, model=theirs, memory=MemoryArgs()), None
    )


def _random_pipeline(
    source: ModelSource, found: type[Any], dtypes: Mapping[str, torch.dtype], device: str
) -> Any:
    """The library's pipeline over modules of its own classes with random weights."""
    parts = {}
    for name, (library, class_name) in source.components.items():
        built = _module(source, name, library, class_name, dtypes.get(name, torch.bfloat16))
        if built is not None:
            fill(built, torch.device(device))
            parts[name] = built
    pipeline = found.from_pretrained(str(source.root), local_files_only=True, **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _module(
    source: ModelSource, name: str, library: str, class_name: str, dtype: torch.dtype
) -> nn.Module | None:
    """A component by its config, its parameters on meta; None for one that is no network."""
    found = library_class(name, library, class_name)
    if not issubclass(found, nn.Module):
        return None
    cls: Any = found
    folder = str(source.root / name)

    def construct() -> nn.Module:
        if library == "diffusers":
            return cls.from_config(cls.load_config(folder))
        return cls(cls.config_class.from_pretrained(folder))

    with default_dtype(dtype):
        module = build_on_meta(construct)
    rule = dtype_rule(module, dtype)
    for path, parameter in module.named_parameters():
        if parameter.is_floating_point():  # what the library loads in float32 whatever is asked for
            parameter.data = parameter.data.to(rule(path))
    return module
