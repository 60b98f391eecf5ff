"""A pipeline's stages in a table: what each reads and writes, without loading anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.registry import REGISTRY, get_model_info, known_models
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import ModelNotFound, UserError
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

if TYPE_CHECKING:
    from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
    from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
        ComposedPipelineBase,
    )
    from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage of a pipeline, for ``sglang models explain``; None means undeclared."""

    name: str
    class_name: str
    role: str
    reads: tuple[str, ...] | None
    writes: tuple[str, ...] | None


def explain(name: str) -> list[StageRow]:
    """The stages of a pipeline with what they read and write; nothing is loaded.

    ``name`` is a pipeline's name, or a model path.

    Raises:
        ModelNotFound: nothing is known by that name.
    """
    stages, roles = _unloaded_stages(name)
    return [
        StageRow(
            name=stage_name,
            class_name=type(stage).__name__,
            role=roles[stage_name].value,
            reads=None if stage.reads is None else tuple(sorted(stage.reads)),
            writes=None if stage.writes is None else tuple(sorted(stage.writes)),
        )
        for stage_name, stage in stages.items()
    ]


def _unloaded_stages(name: str) -> tuple[dict[str, PipelineStage], dict[str, Any]]:
    pipeline_cls, config_cls = _classes_by_name(name)
    placeholders = {m: _Unloaded(m) for m in pipeline_cls._required_config_modules}
    args = ServerArgs.from_flat(device="cpu", pipeline_config=config_cls())
    pipeline = pipeline_cls(name, args, loaded_modules=placeholders)
    return pipeline.stages, pipeline.stage_roles


def _classes_by_name(name: str) -> tuple[type[ComposedPipelineBase], type[PipelineConfig]]:
    models = known_models()
    for known in models:
        if name in known.pipelines:
            return REGISTRY.get_pipeline_class(name), known.pipeline_config
        if name in known.paths:
            return REGISTRY.get_pipeline_class(known.pipelines[0]), known.pipeline_config
    try:
        info = get_model_info(name)
    except UserError as error:
        names = sorted({n for k in models for n in (*k.pipelines, *k.paths)})
        raise ModelNotFound(
            f"{name!r} is neither a known pipeline or model nor a checkpoint."
            f"{did_you_mean(name, names)} Known: {', '.join(names)}. ({error})"
        ) from None
    return info.pipeline_cls, info.pipeline_config_cls


@dataclass(frozen=True, slots=True)
class _Unloaded:
    """Stands for a component where a pipeline is only described."""

    name: str
