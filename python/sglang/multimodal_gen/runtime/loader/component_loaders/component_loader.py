"""How one component of a checkpoint becomes an object: the base of all loaders."""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from sglang.multimodal_gen.runtime.loader.checkpoint import find_checkpoint
from sglang.multimodal_gen.runtime.loader.json_file import read_json_object
from sglang.multimodal_gen.runtime.loader.weights import (
    LoadReceipt,
    load_weights,
    parameters_on_meta,
)
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError
from sglang.multimodal_gen.runtime.utils.precision import parse_precision

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.utils.progress import ProgressListener

LIBRARIES = ("diffusers", "transformers")
"""Where classes that no model file registers may come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSpec:
    """One component to load: where it is, what ``model_index.json`` says, how it is wanted."""

    name: str
    path: Path
    library: str | None
    architecture: str | None
    precision: str
    device: str

    @property
    def config(self) -> dict[str, Any]:
        """Its ``config.json``.

        Raises:
            CheckpointError: the file is absent or no JSON object.
        """
        return read_json_object(self.path / "config.json")


@dataclass(frozen=True, slots=True)
class LoadedComponent:
    """A component that is ready: the object, how it was loaded, how long that took."""

    module: Any
    receipt: LoadReceipt | None
    seconds: float


class ComponentLoader(ABC):
    """Loads components of one kind. A loader that is chosen fails on errors; none falls back."""

    def load(self, spec: ComponentSpec, progress: ProgressListener | None = None) -> LoadedComponent:
        """Load one component.

        Raises:
            CheckpointError: its folder, config or weights are missing, damaged or do not fit.
        """
        if not spec.path.is_dir():
            raise CheckpointError(
                f"component {spec.name!r} is missing: {spec.path} is no folder. The checkpoint is "
                f"incomplete; fetch it again, or set --component-paths.{spec.name}"
            )
        start = time.perf_counter()
        module, receipt = self.load_module(spec, progress)
        return LoadedComponent(module, receipt, time.perf_counter() - start)

    @abstractmethod
    def load_module(
        self, spec: ComponentSpec, progress: ProgressListener | None
    ) -> tuple[Any, LoadReceipt | None]:
        """The object, and a receipt if weights were read."""


class NeuralComponentLoader(ComponentLoader):
    """Builds a module on the meta device and streams its weights into place."""

    def load_module(
        self, spec: ComponentSpec, progress: ProgressListener | None
    ) -> tuple[nn.Module, LoadReceipt]:
        """The module, in eval mode, on its device and in its precision."""
        cls = self.model_class(spec)
        checkpoint = find_checkpoint(spec.path)
        dtype = parse_precision(spec.precision, field=f"component_precisions.{spec.name}")
        with parameters_on_meta():
            module = self.build(cls, spec)
        receipt = load_weights(
            module,
            checkpoint,
            device=spec.device,
            dtype=dtype,
            component=spec.name,
            progress=progress,
        )
        return module, receipt

    def model_class(self, spec: ComponentSpec) -> type:
        """The registered class, else the class that ``model_index.json`` names in its library."""
        name = self.architecture(spec)
        if ModelRegistry.knows(name):
            return ModelRegistry.resolve_model_cls(name)[0]
        return library_class(spec.name, spec.library, name)

    def architecture(self, spec: ComponentSpec) -> str:
        """The architecture's name: ``config.json``'s, else ``model_index.json``'s."""
        name = spec.config.get("_class_name") or spec.architecture
        if not isinstance(name, str):
            raise CheckpointError(
                f"component {spec.name!r}: neither {spec.path / 'config.json'} nor the model index "
                "names its class"
            )
        return name

    def build(self, cls: type, spec: ComponentSpec) -> nn.Module:
        """An instance with parameters on meta, made from the config's non-metadata fields."""
        config = {k: v for k, v in spec.config.items() if not k.startswith("_")}
        try:
            return cls(**config)
        except TypeError as error:
            raise CheckpointError(
                f"component {spec.name!r}: {spec.path / 'config.json'} does not fit "
                f"{cls.__name__}: {error}"
            ) from error


class PlainStateDictComponentLoader(NeuralComponentLoader):
    """For auxiliary modules: a registered class, ``model_cls(**config)``, an unchanged state dict.

    Select it by name in a pipeline's ``component_loaders``. Keys and shapes are strict.
    """

    def model_class(self, spec: ComponentSpec) -> type:
        """The registered class; libraries are not searched."""
        return ModelRegistry.resolve_model_cls(self.architecture(spec))[0]


def library_class(component: str, library: str | None, name: str) -> Any:
    """A class by name from one of the two libraries that checkpoints refer to.

    Raises:
        CheckpointError: the library is another one, or has no such class.
    """
    if library not in LIBRARIES:
        raise CheckpointError(
            f"component {component!r}: class {name} of library {library!r} is not registered, and "
            f"only {' and '.join(LIBRARIES)} are searched; register it with ModelRegistry"
        )
    cls = getattr(importlib.import_module(library), name, None)
    if not isinstance(cls, type):
        raise CheckpointError(
            f"component {component!r}: {library} has no class {name}; a newer {library} may"
        )
    return cls
