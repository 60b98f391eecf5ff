"""Schedulers: Diffusers' own, or registered ones, configured by ``scheduler_config.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    CONSTRUCTION_ERRORS,
    ComponentLoader,
    ComponentSpec,
)
from sglang.multimodal_gen.runtime.loader.component_loaders.library_classes import library_class
from sglang.multimodal_gen.runtime.loader.json_file import read_json_object
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.utils.progress import ProgressListener


class SchedulerLoader(ComponentLoader):
    """Makes the scheduler that ``model_index.json`` names.

    The class named there wins over the one in the scheduler's own file: swapping it, over the
    configuration of another scheduler, is how users of Diffusers change schedulers.
    """

    def load_module(
        self, spec: ComponentSpec, progress: ProgressListener | None
    ) -> tuple[Any, None]:
        """The scheduler; each request copies it."""
        path = spec.path / "scheduler_config.json"
        config = read_json_object(path)
        name = spec.architecture or config.get("_class_name")
        if not isinstance(name, str):
            raise CheckpointError(
                f"component {spec.name!r}: neither {path} nor the model index names its class"
            )
        if ModelRegistry.knows(name):
            cls: Any = ModelRegistry.resolve_model_cls(name)[0]
        else:
            cls = library_class(spec.name, spec.library or "diffusers", name)
        if not (hasattr(cls, "from_config") and hasattr(cls, "set_timesteps")):
            raise CheckpointError(f"component {spec.name!r}: {name} is no scheduler")
        try:
            return cls.from_config(config), None
        except CONSTRUCTION_ERRORS as error:
            raise CheckpointError(
                f"component {spec.name!r}: {path} does not fit {name}: "
                f"{type(error).__name__}: {error}"
            ) from error
