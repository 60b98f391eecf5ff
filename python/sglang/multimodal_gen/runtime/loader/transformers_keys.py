"""Stored names of Transformers checkpoints, renamed by the library's own tables.

The module trees of Transformers move between releases (``CLIPTextModel`` lost its ``text_model.``
prefix in 5.x); the library keeps tables from old names to new ones, and this file asks it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from sglang.multimodal_gen.runtime.loader.key_match import Rename
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a module is one of Transformers' models; does not import the library to find out."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def transformers_rename(model: Any, label: str) -> Rename:
    """Stored name -> name in ``model``, for one-to-one renames.

    The returned function raises CheckpointError for a tensor that the library would have to
    merge or split (fused experts, packed projections): streaming loads tensors one by one.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(model)
    renamings = [step for step in transforms if isinstance(step, WeightRenaming)]
    converters = [step for step in transforms if isinstance(step, WeightConverter)]
    state = model.state_dict()
    prefix = model.base_model_prefix

    def rename(stored: str) -> str:
        name, conversion = rename_source_key(stored, renamings, converters, prefix, state)
        if name not in state and stored in state:
            return stored
        if conversion is not None and name in state:
            raise CheckpointError(
                f"Checkpoint of {label!r}: {stored!r} would have to be merged or split to become "
                f"{name!r} of {type(model).__name__}; this loader only renames tensors. Save the "
                "model again with a current Transformers and use that folder."
            )
        return name

    return rename


def transformers_ignored(model: Any) -> Iterator[str]:
    """Patterns of module names that Transformers ignores when they are stored and not expected."""
    yield from model._keys_to_ignore_on_load_unexpected or ()
    # Once saved by each layer, now computed once for the whole model: there is no such place left.
    if any(name.endswith("rotary_emb.inv_freq") for name, _ in model.named_buffers()):
        yield r"rotary_emb\.inv_freq$"
