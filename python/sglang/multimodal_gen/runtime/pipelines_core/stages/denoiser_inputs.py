"""The denoiser's precision, in which all that it is given must reach it.

Components may be loaded in precisions of their own (``--component-precisions``). What one hands to
the next is cast where they meet; of equal precisions nothing is touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req


def cast_embeddings(batch: Req, dtype: torch.dtype | None) -> None:
    """Give the batch its embeddings in ``dtype``; masks of whole numbers stay as they are."""
    for name in (
        "prompt_embeds",
        "pooled_embeds",
        "negative_prompt_embeds",
        "neg_pooled_embeds",
    ):
        given = getattr(batch, name)
        if any(in_dtype(entry, dtype) is not entry for entry in given):
            setattr(batch, name, [in_dtype(entry, dtype) for entry in given])


def in_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    """A tensor of floating-point numbers in ``dtype``; itself if it is that, or anything else."""
    if dtype is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.to(dtype)
