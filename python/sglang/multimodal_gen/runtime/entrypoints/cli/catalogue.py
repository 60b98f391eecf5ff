"""The Supported Models catalogue: what the registry knows, as Markdown; nothing in it is typed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping

from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
from sglang.multimodal_gen.registry import REGISTRY, KnownModel, known_models
from sglang.multimodal_gen.runtime.loader.model_source import bundled_models
from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.pipelines_core.lora_pipeline import LoRAPipeline
from sglang.multimodal_gen.runtime.verify.mechanisms import DECLARED, declares

REGENERATE = "sglang models --markdown > docs/supported_models.md"

DENOISER_DECLARES: Mapping[str, str] = {
    "TP": DECLARED["dit-tp"][1],
    "SP": DECLARED["sp"][1],
    "layerwise offload": "layer_names",
}
"""Mechanism -> the attribute by which a denoiser's class says that it has it."""

_HEAD = f"""\
# Supported models

Made by `{REGENERATE}` from what the families register;
a test compares. Other checkpoints of a family load by folder or Hugging Face id. What no family
serves is run by its Diffusers pipeline, if it makes images (`--backend diffusers`).
`sglang verify MODEL` says whether a family agrees with its reference on your machine.

| pipeline | settings | model ids | tasks | mechanisms |
| --- | --- | --- | --- | --- |
"""


def markdown() -> str:
    """The whole page."""
    rows = [_row(known) for known in known_models()]
    bundled = ", ".join(f"`{name}`" for name in bundled_models()) or "none"
    return _HEAD + "\n".join(rows) + f"\n\nBundled with the package, no download: {bundled}.\n"


def _row(known: KnownModel) -> str:
    cells = (
        "<br>".join(f"`{name}`" for name in known.pipelines) or "-",
        f"`{known.sampling_params.__name__}`",
        "<br>".join(f"`{path}`" for path in known.paths) or "-",
        ", ".join(known.task_types),
        ", ".join(_mechanisms(known)) or "-",
    )
    return f"| {' | '.join(cells)} |"


def _mechanisms(known: KnownModel) -> Iterator[str]:
    """What all pipelines of a family declare."""
    pipelines = [REGISTRY.get_pipeline_class(name) for name in known.pipelines]
    if pipelines and all(issubclass(cls, LoRAPipeline) for cls in pipelines):
        yield "LoRA"
    hook = known.pipeline_config.prepare_neg_cond_kwargs
    if hook is not PipelineConfig.prepare_neg_cond_kwargs:
        yield "CFG"
    denoisers = [cls for pipeline in pipelines for cls in _denoisers(pipeline)]
    for mechanism, attribute in DENOISER_DECLARES.items():
        if denoisers and all(declares(cls, attribute) for cls in denoisers):
            yield mechanism


def _denoisers(pipeline: type[ComposedPipelineBase]) -> list[type]:
    """The denoisers of a family of this tree: its file of the same name says them."""
    package, _, stem = pipeline.__module__.rpartition(".")
    if package != REGISTRY.pipeline_package:
        return []
    module = f"sglang.multimodal_gen.runtime.models.dits.{stem}"
    if importlib.util.find_spec(module) is None:
        return []
    entry = importlib.import_module(module).EntryClass
    return list(entry) if isinstance(entry, (list, tuple)) else [entry]
