"""A Diffusers pipeline from a folder: safetensors alone, nobody's code, nothing left at random."""

from __future__ import annotations

import logging
import re
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from safetensors import SafetensorError

from sglang.multimodal_gen.runtime.diffusers_backend.call_signature import pipeline_class
from sglang.multimodal_gen.runtime.diffusers_backend.library_messages import library_messages
from sglang.multimodal_gen.runtime.diffusers_backend.offload import place
from sglang.multimodal_gen.runtime.diffusers_backend.schedulers import choose_scheduler
from sglang.multimodal_gen.runtime.loader.model_source import ModelSource
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, OutOfMemory
from sglang.multimodal_gen.runtime.utils.precision import parse_precision
from sglang.multimodal_gen.runtime.utils.progress import ProgressEvent, ProgressListener

logger = logging.getLogger(__name__)

_LABEL = "Diffusers pipeline"
# What the libraries log where a checkpoint lacks weights; they go on with random ones.
_RANDOM_WEIGHTS = re.compile(r"newly initialized|\bMISSING\b")
# What they raise for a folder that is incomplete, damaged or of another version.
UNLOADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError,
              NotImplementedError, SafetensorError)  # fmt: skip


def check_components(source: ModelSource) -> None:
    """Refuse a checkpoint that lacks a component, or has one of another library: importing that
    would run its code.

    Raises:
        CheckpointError: names the component.
    """
    for name, (library, class_name) in source.components.items():
        if not (source.root / name).is_dir():
            raise CheckpointError(
                f"{source.name}: component {name!r} has no folder, though model_index.json names "
                "it; is the download complete?"
            )
        if library in ("diffusers", "transformers") or hasattr(diffusers.pipelines, library):
            continue
        raise CheckpointError(
            f"{source.name}: component {name!r} is {class_name} of {library!r}; only classes of "
            "diffusers and transformers are loaded, and no code of a checkpoint is run"
        )


def load_pipeline(
    source: ModelSource, server_args: ServerArgs, progress: ProgressListener | None
) -> DiffusionPipeline:
    """Load the pipeline that a checkpoint names, in the precisions asked for, on the device.

    Raises:
        CheckpointError: files are missing, damaged, pickled or do not fit; weights are absent.
        OutOfMemory: the device cannot hold it.
    """
    total = _weight_bytes(source)
    _report(progress, 0, total)
    with library_messages() as messages:
        try:
            pipeline = pipeline_class(source.class_name or "").from_pretrained(
                str(source.root),
                dtype=_dtypes(server_args),
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
            )
            choose_scheduler(pipeline, server_args)
            place(pipeline, server_args)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"{source.name} does not fit into the device's memory ({error}). Try --precision "
                "bf16, or --device cpu"
            ) from error
        except UNLOADABLE as error:
            raise CheckpointError(
                f"{source.name}: Diffusers cannot load it: {type(error).__name__}: {error}"
            ) from error
    for message in messages:
        if _RANDOM_WEIGHTS.search(message):
            raise CheckpointError(f"{source.name}: the checkpoint lacks weights: {message}")
        logger.warning("%s: %s", source.name, message)
    pipeline.set_progress_bar_config(disable=True)
    _report(progress, total, total)
    return pipeline


def _dtypes(server_args: ServerArgs) -> Any:
    """The dtype of all components, or of each by name where some differ."""
    config, model = server_args.pipeline_config, server_args.model
    assert config is not None
    name = config.dit_precision if model.precision in ("auto", "config") else model.precision
    whole = parse_precision(name)
    parts = {
        component: parse_precision(text, field=f"component_precisions.{component}")
        for component, text in model.component_precisions.items()
    }
    return {"default": whole, **parts} if parts else whole


def _weight_bytes(source: ModelSource) -> int:
    files = (f for name in source.components for f in (source.root / name).glob("*.safetensors"))
    return max(sum(file.stat().st_size for file in files), 1)


def _report(progress: ProgressListener | None, done: int, total: int) -> None:
    if progress is not None:
        progress(ProgressEvent("load", done, total, _LABEL))
