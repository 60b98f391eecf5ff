"""This runtime's side of a measurement: the model, found and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.entrypoints.bench.trial import RuntimeSide
from sglang.multimodal_gen.runtime.loader.random_weights import random_components
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.platforms.device import device_facts
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.resolve import resolve
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

OURS = "sglang"


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


def our_side(
    model: ModelDescription, values: Mapping[str, Any], *, random_weights: bool
) -> RuntimeSide:
    """This runtime (or what ``--backend`` says), loaded."""
    if not random_weights:
        return RuntimeSide(model.info.backend, model, model.open_pipeline(), values)
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
    return RuntimeSide(OURS, model, pipeline, values)
