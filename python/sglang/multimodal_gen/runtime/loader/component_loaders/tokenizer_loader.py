"""Tokenizers: Transformers' own, from the files in their folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    ComponentLoader,
    ComponentSpec,
)
from sglang.multimodal_gen.runtime.loader.component_loaders.library_classes import library_class
from sglang.multimodal_gen.runtime.loader.json_file import read_json_object
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.utils.progress import ProgressListener

FAST_FILE = "tokenizer.json"
"""The whole tokenizer in one file; with it, no other vocabulary file is needed."""


class TokenizerLoader(ComponentLoader):
    """Makes the tokenizer that ``model_index.json`` names; runs no code of its folder."""

    def load_module(
        self, spec: ComponentSpec, progress: ProgressListener | None
    ) -> tuple[Any, None]:
        """The tokenizer."""
        import transformers  # here: seconds of import that weights alone do not need

        name = spec.architecture or "AutoTokenizer"
        cls = library_class(spec.name, spec.library or "transformers", name)
        if not issubclass(cls, (transformers.PreTrainedTokenizerBase, transformers.AutoTokenizer)):
            raise CheckpointError(f"component {spec.name!r}: {name} is no tokenizer")
        _check_files(spec, getattr(cls, "vocab_files_names", {}))
        try:
            tokenizer = cls.from_pretrained(
                spec.path, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"component {spec.name!r}: {spec.path} holds no usable tokenizer: {error}"
            ) from error
        return tokenizer, None


class ProcessorTokenizerLoader(TokenizerLoader):
    """For checkpoints whose tokenizer lies in a processor's folder, under the processor's name: the
    class is the one that ``tokenizer_config.json`` names."""

    def load_module(
        self, spec: ComponentSpec, progress: ProgressListener | None
    ) -> tuple[Any, None]:
        """The tokenizer."""
        spec = replace(spec, library="transformers", architecture="AutoTokenizer")
        return super().load_module(spec, progress)


def _check_files(spec: ComponentSpec, vocabulary: dict[str, str]) -> None:
    """Refuse missing and damaged files: from an empty folder, Transformers makes a tokenizer that
    knows no word and says nothing."""
    slow = [file for file in vocabulary.values() if file != FAST_FILE]
    if (spec.path / FAST_FILE).is_file():
        used = [FAST_FILE]
    else:
        used = slow or list(vocabulary.values())
        missing = [file for file in used if not (spec.path / file).is_file()]
        if missing:
            alternative = f" (or {FAST_FILE})" if slow else ""
            raise CheckpointError(
                f"component {spec.name!r}: {spec.path} lacks {', '.join(missing)}{alternative}. "
                "Likely cause: an incomplete download."
            )
    settings = spec.path / "tokenizer_config.json"
    for path in [*(spec.path / file for file in used), *([settings] if settings.exists() else [])]:
        if path.suffix == ".json":
            read_json_object(path)
        elif _is_stub(path):
            raise CheckpointError(
                f"component {spec.name!r}: {path} is empty or a Git LFS pointer; fetch it again"
            )


def _is_stub(path: Path) -> bool:
    with path.open("rb") as stream:
        head = stream.read(24)
    return not head or head.startswith(b"version https://git-lfs")
