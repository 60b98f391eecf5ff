"""A small copy of a checkpoint: its own configs, shrunk, with random weights that hide nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    CONSTRUCTION_ERRORS,
    ComponentLoader,
    ComponentSpec,
    NeuralComponentLoader,
    PlainStateDictComponentLoader,
)
from sglang.multimodal_gen.runtime.loader.component_loaders.library_classes import (
    LIBRARIES,
    library_class,
)
from sglang.multimodal_gen.runtime.loader.component_loaders.text_encoder_loader import (
    TextEncoderLoader,
)
from sglang.multimodal_gen.runtime.loader.components import LOADERS
from sglang.multimodal_gen.runtime.loader.json_file import read_json_object
from sglang.multimodal_gen.runtime.loader.meta_build import build_on_meta
from sglang.multimodal_gen.runtime.loader.model_index import MODEL_INDEX, SAMPLING_DEFAULTS
from sglang.multimodal_gen.runtime.loader.model_source import ModelSource
from sglang.multimodal_gen.runtime.utils.component_roles import role_of
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError
from sglang.multimodal_gen.runtime.verify.quiet_library import no_library_bars
from sglang.multimodal_gen.runtime.verify.shrunk_config import DIVISORS, common_divisor, shrunk
from sglang.multimodal_gen.runtime.verify.tiny_weights import fill_with_noise

WEIGHTLESS_ROLES = (
    "scheduler", "tokenizer", "feature_extractor", "processor", "image_processor",
)  # fmt: skip
NEURAL_ROLES = ("transformer", "unet", "vae", "text_encoder", "image_encoder")
WEIGHTS = "diffusion_pytorch_model.safetensors"


@dataclass(frozen=True)
class TinyCheckpoint:
    """Where it is, how many parameters it has, and by what its widths were divided."""

    root: Path
    parameters: int
    divisor: int


def write_tiny_checkpoint(
    source: ModelSource,
    folder: Path,
    seed: int = 0,
    loaders: Mapping[str, type[ComponentLoader]] | None = None,
) -> TinyCheckpoint:
    """Write a small copy of a checkpoint, made from its configs alone: no weight of it is read.

    Modules are built as their loaders build them; ``loaders`` are those that the pipeline chooses,
    by the names of ``model_index.json``.

    Where a class refuses the divided widths, they are divided by less; depth is always cut.

    Raises:
        CheckpointError: a component has no config, or its class cannot be built from it.
    """
    _require_folders(source)
    parts = _neural_components(source, loaders or {})
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
    """One component with weights: its config, and how loaders make modules of it.

    ``cls`` is the class that its files are written from: the library's, whose names published
    checkpoints have, else the port's. ``native`` is what the port's own loader makes.
    """

    name: str
    config: Mapping[str, Any]
    cls: Any
    loader: NeuralComponentLoader
    native: Any
    native_loader: NeuralComponentLoader

    def can_be_built(self, divisor: int) -> bool:
        for build in (lambda: self.build(divisor), lambda: self._native(divisor)):
            try:
                build_on_meta(build)
            except CONSTRUCTION_ERRORS:
                return False
        return True

    def build(self, divisor: int) -> nn.Module:
        return self.loader.build(self.cls, self._spec(divisor))

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
        return self.native_loader.build(self.native, self._spec(divisor))

    def _spec(self, divisor: int) -> ComponentSpec:
        return _spec(self.name, None, None, shrunk(self.config, divisor))


def _spec(
    name: str, library: str | None, architecture: str | None, config: Mapping[str, Any]
) -> ComponentSpec:
    """A component that is a config alone."""
    nowhere = Path("/nonexistent")
    return ComponentSpec(
        name=name, path=nowhere, library=library, architecture=architecture, precision="fp32",
        device="cpu", default_config=config,
    )  # fmt: skip


def _neural_components(
    source: ModelSource, loaders: Mapping[str, type[ComponentLoader]]
) -> dict[str, _Part]:
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
        usual = TextEncoderLoader()  # makes classes with a configuration object, and those without
        chosen = (loaders.get(name) or LOADERS.get(role_of(name)) or TextEncoderLoader)()
        own = chosen if isinstance(chosen, NeuralComponentLoader) else usual
        native = own.model_class(_spec(name, library, architecture, config))
        plain = isinstance(own, PlainStateDictComponentLoader)
        if library in LIBRARIES and not plain:
            parts[name] = _Part(
                name, config, library_class(name, library, architecture), usual, native, own
            )
        else:
            parts[name] = _Part(name, config, native, own, native, own)
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
