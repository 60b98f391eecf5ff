"""Image processors: Transformers' own, from the settings in their folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    CONSTRUCTION_ERRORS,
    ComponentLoader,
    ComponentSpec,
)
from sglang.multimodal_gen.runtime.loader.component_loaders.library_classes import library_class
from sglang.multimodal_gen.runtime.loader.json_file import read_json_object
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.utils.progress import ProgressListener

SETTINGS = "preprocessor_config.json"


class ImageProcessorLoader(ComponentLoader):
    """Makes the image processor that ``model_index.json`` names; runs no code of its folder."""

    def load_module(
        self, spec: ComponentSpec, progress: ProgressListener | None
    ) -> tuple[Any, None]:
        """The processor."""
        settings = read_json_object(spec.path / SETTINGS)
        name = spec.architecture or settings.get("image_processor_type")
        if not isinstance(name, str):
            raise CheckpointError(
                f"component {spec.name!r}: neither {spec.path / SETTINGS} nor the model index "
                "names its class"
            )
        cls = library_class(spec.name, spec.library or "transformers", name)
        if not hasattr(cls, "from_dict") or not hasattr(cls, "preprocess"):
            raise CheckpointError(f"component {spec.name!r}: {name} is no image processor")
        try:
            return cls.from_dict(settings), None
        except CONSTRUCTION_ERRORS as error:
            raise CheckpointError(
                f"component {spec.name!r}: {spec.path / SETTINGS} does not fit {name}: "
                f"{type(error).__name__}: {error}"
            ) from error
