"""The scheduler of a Diffusers pipeline: the checkpoint's, or one that takes its place."""

from __future__ import annotations

from typing import Any

import diffusers

from sglang.multimodal_gen.runtime.diffusers_backend.settings import DiffusersPipelineConfig
from sglang.multimodal_gen.runtime.loader.model_source import ModelSource
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

_FIELD = "pipeline_config.scheduler"


def check_scheduler(name: str, source: ModelSource) -> None:
    """Refuse, before anything is loaded, a scheduler that cannot stand for the checkpoint's.

    Raises:
        InvalidArgument: names those that can (Diffusers' ``compatibles``).
    """
    if not name:
        return
    _, own = source.components.get("scheduler", ("", ""))
    found = getattr(diffusers, own, None) if own else None
    if found is None or not hasattr(found, "_get_compatibles"):
        problem = "this checkpoint has no scheduler that Diffusers says others are compatible with"
        raise InvalidArgument(_FIELD, name, problem)
    known = sorted({cls.__name__ for cls in found._get_compatibles()} | {own})
    if name not in known:
        problem = (
            f"cannot stand for the checkpoint's {own}.{did_you_mean(name, known)} "
            f"These can: {', '.join(known)}"
        )
        raise InvalidArgument(_FIELD, name, problem)


def choose_scheduler(pipeline: Any, server_args: ServerArgs) -> None:
    """Put the operator's scheduler, made from the settings of the checkpoint's, in its place."""
    config = server_args.pipeline_config
    if not isinstance(config, DiffusersPipelineConfig):
        return  # loaded as a reference, beside a family's own pipeline
    if config.scheduler and config.scheduler != type(pipeline.scheduler).__name__:
        chosen = getattr(diffusers, config.scheduler)
        pipeline.scheduler = chosen.from_config(pipeline.scheduler.config)
