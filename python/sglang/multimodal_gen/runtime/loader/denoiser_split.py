"""Which of a pipeline's components are denoisers; their attention, and how they are split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from sglang.multimodal_gen.runtime.cache.step_cache_plan import method_problem
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.layers.attention.backends.backend import AttentionBackend
from sglang.multimodal_gen.runtime.layers.attention.backends.choice import check_dtype
from sglang.multimodal_gen.runtime.layers.attention.usp import USPAttention
from sglang.multimodal_gen.runtime.layers.computing_dtype import computing_dtype
from sglang.multimodal_gen.runtime.layers.sequence_parallel import (
    check_denoiser,
    heads_of,
    split_denoiser,
)
from sglang.multimodal_gen.runtime.loader.component_loaders.library_classes import library_class
from sglang.multimodal_gen.runtime.loader.components import component_class, read_component_configs
from sglang.multimodal_gen.runtime.loader.model_source import ModelSource
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.component_roles import is_denoiser
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument


def check_denoisers(
    source: ModelSource,
    names: Mapping[str, str],
    server_args: ServerArgs,
    default_configs: Mapping[str, Mapping[str, Any]],
    parallel: ParallelState,
) -> None:
    """Refuse what cannot be split while it costs nothing: from JSON files, before weights.

    ``names`` maps a pipeline's component names to those of ``model_index.json``.

    Raises:
        InvalidArgument: a denoiser has no ``SP_PLAN``, or heads that do not divide.
    """
    if parallel.sp.size == 1:
        return
    for name, cls, config in _classes(source, names, server_args, default_configs):
        check_denoiser(cls, config, parallel, name)


def denoiser_heads(
    source: ModelSource,
    names: Mapping[str, str],
    server_args: ServerArgs,
    default_configs: Mapping[str, Mapping[str, Any]],
) -> tuple[int, ...]:
    """The number of attention heads of each denoiser that has an ``SP_PLAN``; reads JSON alone."""
    found = _classes(source, names, server_args, default_configs)
    heads = (heads_of(cls, config) for _, cls, config in found)
    return tuple(number for number in heads if number is not None)


def denoiser_step_cache_problem(
    source: ModelSource,
    names: Mapping[str, str],
    server_args: ServerArgs,
    default_configs: Mapping[str, Mapping[str, Any]],
    method: str,
) -> str | None:
    """Why a denoiser among the components can have no step cache, if so; reads JSON alone."""
    found = _classes(source, names, server_args, default_configs)
    problems = [method_problem(cls, method) for _, cls, _ in found]
    return next((problem for problem in problems if problem is not None), None)


def _classes(
    source: ModelSource,
    names: Mapping[str, str],
    server_args: ServerArgs,
    default_configs: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[str, type, Mapping[str, Any]]]:
    """The denoisers: their names, classes and configs; the loader speaks of those left out here."""
    configs = {**default_configs, **read_component_configs(source, names, server_args)}
    for name in denoisers(names):
        config = configs.get(name, {})
        library, named = component_class(source, name, names[name], server_args)
        architecture = config.get("_class_name") or named
        if not isinstance(architecture, str):
            continue
        if ModelRegistry.knows(architecture):
            cls = ModelRegistry.resolve_model_cls(architecture)[0]
        else:
            cls = library_class(name, library, architecture)
        yield name, cls, config


def split_denoisers(
    modules: Mapping[str, Any], names: Mapping[str, str], parallel: ParallelState
) -> None:
    """Split the sequences of a pipeline's denoisers, as their ``SP_PLAN`` says.

    Raises:
        InvalidArgument: sequences are to be split, and the pipeline has no denoiser that can.
        PipelineDefinitionError: an ``SP_PLAN`` does not fit its model.
    """
    found = [name for name in denoisers(names) if isinstance(modules[name], nn.Module)]
    for name in found:
        split_denoiser(modules[name], parallel, name)
    if not found and parallel.sp.size > 1:
        raise InvalidArgument(
            "sp_degree",
            parallel.sp.size,
            f"no component of this pipeline ({', '.join(names)}) is a denoiser, so there is "
            "no sequence to split; leave sp_degree, ulysses_degree and ring_degree out",
        )


def give_attention(
    modules: Mapping[str, Any], names: Mapping[str, str], backend: AttentionBackend, wish: str
) -> None:
    """Put ``backend`` behind every `USPAttention` of a pipeline's denoisers.

    Raises:
        InvalidArgument: a backend is wished that does not take the denoiser's dtype, or no layer
            would take it.
    """
    given = 0
    for name in denoisers(names):
        if not isinstance(modules[name], nn.Module):
            continue
        layers = [m for m in modules[name].modules() if isinstance(m, USPAttention)]
        dtype = computing_dtype(modules[name])  # some weights may be kept in float32
        if layers and dtype is not None:
            check_dtype(backend, dtype, name)
        for layer in layers:
            layer.backend = backend
        given += len(layers)
    if not given and wish != "auto":
        problem = "no denoiser of this pipeline has attention that could be chosen. Leave it out"
        raise InvalidArgument("attention_backend", wish, problem)


def denoisers(names: Mapping[str, str]) -> list[str]:
    """Which of a pipeline's components (name -> that of ``model_index.json``) are denoisers."""
    return [name for name, key in names.items() if is_denoiser(name, key)]
