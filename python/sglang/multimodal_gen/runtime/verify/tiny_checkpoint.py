"""A small copy of a checkpoint: its own configs, shrunk, with random weights that hide nothing."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    CONSTRUCTION_ERRORS,
)
from sglang.multimodal_gen.runtime.loader.component_loaders.library_classes import (
    LIBRARIES,
    library_class,
)
from sglang.multimodal_gen.runtime.loader.components import role_of
from sglang.multimodal_gen.runtime.loader.json_file import read_json_object
from sglang.multimodal_gen.runtime.loader.meta_build import build_on_meta
from sglang.multimodal_gen.runtime.loader.model_index import MODEL_INDEX, SAMPLING_DEFAULTS
from sglang.multimodal_gen.runtime.loader.model_source import ModelSource
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError
from sglang.multimodal_gen.runtime.verify.quiet_library import no_library_bars
from sglang.multimodal_gen.runtime.verify.shrunk_config import DIVISORS, common_divisor, shrunk
from sglang.multimodal_gen.runtime.verify.tiny_weights import fill_with_noise

WEIGHTLESS_ROLES = ("scheduler", "tokenizer", "feature_extractor", "processor")
NEURAL_ROLES = ("transformer", "unet", "vae", "text_encoder", "image_encoder")
WEIGHTS = "diffusion_pytorch_model.safetensors"


@dataclass(frozen=True)
class TinyCheckpoint:
    """Where it is, how many parameters it has, and by what its widths were divided."""

    root: Path
    parameters: int
    divisor: int


def write_tiny_checkpoint(source: ModelSource, folder: Path, seed: int = 0) -> TinyCheckpoint:
    """Write a small copy of a checkpoint, made from its configs alone: no weight of it is read.

    Where a class refuses the divided widths, they are divided by less; depth is always cut.

    Raises:
        CheckpointError: a component has no config, or its class cannot be built from it.
    """
    _require_folders(source)
    parts = _neural_components(source)
    divisor = common_divisor({name: part.config for name, part in parts.items()})
    while divisor > 1 and not all(part.can_be_built(divisor) for part in parts.values()):
        divisor = DIVISORS[DIVISORS.index(divisor) + 1]
    parameters = 0
    for index, (name, part) in enumerate(parts.items()):
        try:
            module = part.build(divisor)
        except CONSTRUCTION_ERRORS as error:
            raise CheckpointError(
                f"component {name!r}: {part.cls.__name__} cannot be built from its own config.json "
                f"with {shrunk(part.config, divisor)}: {type(error).__name__}: {error}. Give a "
                "small checkpoint's folder as MODEL, with --weights real"
            ) from error
        fill_with_noise(module, seed + index)
        part.save(module, folder / name, divisor)
        parameters += sum(p.numel() for p in module.parameters())
    for name in source.components.keys() - parts.keys():
        shutil.copytree(source.root / name, folder / name)
    for name in (MODEL_INDEX, SAMPLING_DEFAULTS):
        if (source.root / name).is_file():
            shutil.copy(source.root / name, folder / name)
    return TinyCheckpoint(folder, parameters, divisor)


@dataclass(frozen=True)
class _Part:
    """One component with weights: its config, its class, and how that is built and saved."""

    config: Mapping[str, Any]
    cls: Any
    native: Any
    """The class that the port builds from the same config, where it is another one."""

    def can_be_built(self, divisor: int) -> bool:
        for build in (lambda: self.build(divisor), lambda: self._native(divisor)):
            try:
                build_on_meta(build)
            except CONSTRUCTION_ERRORS:
                return False
        return True

    def build(self, divisor: int) -> nn.Module:
        config = shrunk(self.config, divisor)
        return _constructor(self.cls)(config)

    def save(self, module: Any, folder: Path, divisor: int) -> None:
        if hasattr(module, "save_pretrained"):
            with no_library_bars():
                module.save_pretrained(folder)
            return
        folder.mkdir(parents=True)
        save_file({k: v.contiguous() for k, v in module.state_dict().items()}, folder / WEIGHTS)
        config = json.dumps(shrunk(self.config, divisor), indent=2)
        (folder / "config.json").write_text(config, encoding="utf-8")

    def _native(self, divisor: int) -> nn.Module:
        return _constructor(self.native)(shrunk(self.config, divisor))


def _constructor(cls: Any) -> Callable[[Mapping[str, Any]], nn.Module]:
    """How a class of Transformers, of Diffusers or of a porter is made from a config."""
    config_class = getattr(cls, "config_class", None)
    if config_class is not None:

        def from_record(config: Mapping[str, Any]) -> nn.Module:
            part = config.get(config_class.base_config_key)
            return cls(config_class.from_dict(dict(part if isinstance(part, dict) else config)))

        return from_record

    def from_fields(config: Mapping[str, Any]) -> nn.Module:
        fields = {key: value for key, value in config.items() if not key.startswith("_")}
        if cls.__module__.startswith("diffusers."):
            fields = {k: v for k, v in fields.items() if k in inspect.signature(cls).parameters}
        return cls(**fields)

    return from_fields


def _neural_components(source: ModelSource) -> dict[str, _Part]:
    if not source.indexed:
        raise CheckpointError(
            f"{source.name} has no {MODEL_INDEX}, which says what its components are; --weights "
            "real takes it as it is"
        )
    parts = {}
    for name, (library, architecture) in source.components.items():
        path = source.root / name / "config.json"
        if role_of(name) in WEIGHTLESS_ROLES or not path.is_file():
            continue
        config = read_json_object(path)
        known = config.get("_class_name", architecture)
        registered = ModelRegistry.knows(known)
        native = ModelRegistry.resolve_model_cls(known)[0] if registered else None
        outside = library in LIBRARIES
        cls = library_class(name, library, architecture) if outside or native is None else native
        parts[name] = _Part(config, cls, cls if native is None else native)
    return parts


def _require_folders(source: ModelSource) -> None:
    """What a checkpoint lacks is told of the checkpoint, before a copy of it is begun."""
    for name in source.components:
        path = source.root / name
        if not path.is_dir():
            raise CheckpointError(
                f"component {name!r} is missing: {path} is no folder. The checkpoint is "
                "incomplete; fetch it again"
            )
        if role_of(name) in NEURAL_ROLES and not (path / "config.json").is_file():
            raise CheckpointError(f"{path / 'config.json'} does not exist.")
