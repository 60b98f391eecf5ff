"""Picture processors: Transformers' own, from the files of a model that sees pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    ComponentLoader,
    ComponentSpec,
)
from sglang.multimodal_gen.runtime.loader.json_file import read_json_object
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.utils.progress import ProgressListener

FILES = ("processor_config.json", "preprocessor_config.json")


class PictureProcessorLoader(ComponentLoader):
    """Makes the part of a processor that is for pictures; the text has its own tokenizer.

    The one that works on Pillow's images: it needs no torchvision, and gives the same pixels
    wherever it runs.
    """

    def load_module(
        self, spec: ComponentSpec, progress: ProgressListener | None
    ) -> tuple[Any, None]:
        """The processor; runs no code of its folder."""
        import transformers  # here: seconds of import that weights alone do not need

        found = [spec.path / name for name in FILES if (spec.path / name).is_file()]
        if not found:
            raise CheckpointError(
                f"component {spec.name!r}: {spec.path} has neither {' nor '.join(FILES)}. "
                "Likely cause: an incomplete download."
            )
        for path in found:
            read_json_object(path)
        try:
            processor = transformers.AutoImageProcessor.from_pretrained(
                spec.path, backend="pil", local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"component {spec.name!r}: {spec.path} holds no usable picture processor: {error}"
            ) from error
        return processor, None
