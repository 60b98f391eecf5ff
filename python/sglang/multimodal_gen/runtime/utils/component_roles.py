"""What a component's name says of it: the role it plays, and whether it denoises."""

from __future__ import annotations

DENOISER = "transformer"
"""The role of denoisers, whatever their names are."""
ROLES = (DENOISER, "text_encoder", "image_encoder", "vae", "scheduler", "tokenizer",
         "processor", "image_processor")  # fmt: skip
"""Names that say how a component is loaded and placed; others are a pipeline's own."""
_DENOISERS = (DENOISER, "unet")


def role_of(component: str, stands_for: str | None = None) -> str:
    """``text_encoder_2`` plays the role ``text_encoder``.

    A name of a pipeline's own plays the role of what it stands for in ``model_index.json``, where
    that has one.
    """
    base, _, number = component.rpartition("_")
    role = base if base and number.isdigit() else component
    if role in ROLES or stands_for is None:
        return role
    return role_of(stands_for)


def is_denoiser(*names: str) -> bool:
    """Whether a component denoises, by its name or by that which it stands for.

    ``transformer``, ``transformer_2``, ``transformer_vace``, ``unet``: whatever begins so is split,
    sharded and adapted like one, or refused; never held whole by every rank in silence.
    """
    return any(name.split("_")[0] in _DENOISERS for name in names)
