"""Precision names as users write them, and the torch dtypes that they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

if TYPE_CHECKING:
    import torch

# Names first, so that flags can be checked without importing torch.
PRECISIONS: tuple[str, ...] = ("fp32", "fp16", "bf16")


def parse_precision(text: str, *, field: str = "precision") -> torch.dtype:
    """The torch dtype that a precision name means.

    Args:
        text: one of ``PRECISIONS``, in any case.
        field: what an error message calls the value, e.g. ``component_precisions.vae``.

    Raises:
        InvalidArgument: for any other text.
    """
    if isinstance(text, str):
        text = text.lower()
    if text not in PRECISIONS:
        raise InvalidArgument(
            field, text, f"use one of {', '.join(PRECISIONS)}.{did_you_mean(str(text), PRECISIONS)}"
        )
    import torch  # here, because rung 0 must stay importable without torch

    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[text]
