"""Components without weights: schedulers and tokenizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    ComponentLoader,
    ComponentSpec,
    library_class,
)
from sglang.multimodal_gen.runtime.loader.json_file import read_json_object
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.utils.progress import ProgressListener


class SchedulerLoader(ComponentLoader):
    """A Diffusers scheduler from its ``scheduler_config.json``."""

    def load_module(
        self, spec: ComponentSpec, progress: ProgressListener | None
    ) -> tuple[Any, None]:
        """The scheduler; each request copies it."""
        config = read_json_object(spec.path / "scheduler_config.json")
        name = spec.architecture or str(config.get("_class_name"))
        if ModelRegistry.knows(name):
            cls: Any = ModelRegistry.resolve_model_cls(name)[0]
        else:
            cls = library_class(spec.name, spec.library, name)
        return cls.from_config(config), None


class TokenizerLoader(ComponentLoader):
    """A Transformers tokenizer from its folder; runs no code from it and asks no hub."""

    def load_module(
        self, spec: ComponentSpec, progress: ProgressListener | None
    ) -> tuple[Any, None]:
        """The tokenizer of the class that the checkpoint names, or of its successor."""
        import transformers

        cls = getattr(transformers, spec.architecture or "", None) or transformers.AutoTokenizer
        try:
            tokenizer = cls.from_pretrained(
                spec.path, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"component {spec.name!r}: {spec.path} holds no usable tokenizer: {error}"
            ) from error
        return tokenizer, None
