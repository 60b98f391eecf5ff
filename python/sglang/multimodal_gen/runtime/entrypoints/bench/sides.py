"""The two sides of a measurement: this runtime, and the Diffusers library on the same model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.entrypoints.bench.trial import Side
from sglang.multimodal_gen.runtime.loader.component_loaders.library_classes import library_class
from sglang.multimodal_gen.runtime.loader.meta_build import build_on_meta, default_dtype
from sglang.multimodal_gen.runtime.loader.model_source import ModelSource
from sglang.multimodal_gen.runtime.loader.random_weights import fill, random_components
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.platforms.device import device_facts
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.resolve import resolve
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, UserError
from sglang.multimodal_gen.runtime.utils.precision import parse_precision

OURS, THEIRS = "sglang", "diffusers"


def describe(server_args: ServerArgs) -> ModelDescription:
    """The model that is measured, with resolved arguments.

    Raises:
        InvalidArgument: several ranks; steps of those are timed by another script.
        UserError, CheckpointError: it cannot be found.
    """
    resolved = resolve(server_args, device_facts()).args
    ranks = resolved.parallel.layout.world_size
    if ranks > 1:
        problem = "one rank is measured here; benchmarks/parallel_step.py times several"
        raise InvalidArgument("num_gpus", ranks, problem)
    return ModelDescription.find(resolved)


def our_side(model: ModelDescription, values: Mapping[str, Any], *, random_weights: bool) -> Side:
    """This runtime (or what ``--backend`` says), loaded."""
    if not random_weights:
        return Side(model.info.backend, model, model.open_pipeline(), values)
    cls, args = model.info.pipeline_cls, model.server_args
    if model.info.backend != OURS:
        problem = "makes the modules of native families; leave --backend out"
        raise InvalidArgument("random_weights", True, problem)
    parallel = ParallelState.single(args.platform.device)
    modules = random_components(
        model.source, cls._index_names(), args, cls.component_loaders,
        cls.default_component_configs, parallel=parallel,
    )  # fmt: skip
    pipeline = cls(model.source.name, args, loaded_modules=modules, parallel=parallel)
    return Side(OURS, model, pipeline, values)


def their_side(
    server_args: ServerArgs, values: Mapping[str, Any], *, random_weights: bool, compiled: bool
) -> Side:
    """The Diffusers library's pipeline on the same folder.

    Only what it has a notion of is handed on: the model, the device, the precision. It is the same
    yardstick for ours in eight bits.

    Raises:
        UserError, CheckpointError: it cannot run this model.
    """
    theirs = dataclasses.replace(
        server_args.model, backend="diffusers", quantization=None, quantization_ignored_layers=()
    )
    asked = ServerArgs(model=theirs, platform=server_args.platform)
    model = ModelDescription.find(resolve(asked, device_facts()).args)
    given = {"pipeline": _library_pipeline(model)} if random_weights else None
    if given is None:
        pipeline = model.open_pipeline()
    else:
        given |= given["pipeline"].components
        args = model.server_args
        pipeline = model.info.pipeline_cls(model.source.name, args, loaded_modules=given)
    side = Side(THEIRS, model, pipeline, values)
    if compiled:
        side.name = f"{THEIRS}, compiled"
        _compile(pipeline.get_module("pipeline"))
    model.admit(model.sampling_params(values))  # a setting that it does not take is told now
    return side


def _library_pipeline(model: ModelDescription) -> Any:
    """The library's pipeline over modules of its own classes with random weights."""
    from sglang.multimodal_gen.runtime.diffusers_backend.call_signature import pipeline_class

    args, source = model.server_args, model.source
    device = torch.device(args.platform.device)
    config = args.pipeline_config
    assert config is not None
    wish = args.model.precision
    dtype = parse_precision(config.dit_precision if wish in ("auto", "config") else wish)
    parts = {}
    for name, (library, class_name) in source.components.items():
        built = _module(source, name, library, class_name, dtype)
        if built is not None:
            fill(built, device)
            parts[name] = built
    found = pipeline_class(source.class_name or "")
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
        return build_on_meta(construct)


def _compile(pipeline: Any) -> None:
    """Its repeated blocks, as Diffusers' documentation has it."""
    denoisers = [
        module
        for name, module in pipeline.components.items()
        if name.startswith(("transformer", "unet")) and hasattr(module, "compile_repeated_blocks")
    ]
    if not denoisers:
        raise UserError(
            "--reference diffusers-compiled: this pipeline has no denoiser whose blocks compile"
        )
    for denoiser in denoisers:
        denoiser.compile_repeated_blocks(fullgraph=True)
