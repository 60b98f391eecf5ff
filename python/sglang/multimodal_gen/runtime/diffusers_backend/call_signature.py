"""What a Diffusers pipeline's ``__call__`` takes, known before a weight is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from sglang.multimodal_gen.runtime.utils.errors import ModelNotFound
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

OURS = frozenset(
    {
        "output_type",
        "return_dict",
        "callback",
        "callback_steps",
        "callback_on_step_end",
        "callback_on_step_end_tensor_inputs",
        "batch_size",
    }
)
"""Parameters that the runtime fills itself, for every request alike."""


NO_PICTURES = ("num_frames", "video", "frames", "video_length", "audio_length_in_s")
"""Parameters of pipelines that make something else."""

_NONE = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class CallSignature:
    """The parameters of one pipeline class's ``__call__``, by name, with their defaults."""

    class_name: str
    defaults: Mapping[str, Any]

    def __contains__(self, name: str) -> bool:
        return name in self.defaults

    @property
    def required(self) -> list[str]:
        """The parameters that have no default."""
        return [name for name, default in self.defaults.items() if default is _NONE]

    def refusal(self, name: str) -> str:
        """Why an argument of that name is refused: what is near it, and what there is."""
        offered = [known for known in self.defaults if known not in OURS]
        return (
            f"{self.class_name} takes no argument {name!r}.{did_you_mean(name, offered)} "
            f"It takes: {', '.join(offered)}"
        )


def offers(class_name: str | None) -> bool:
    """Whether Diffusers has a pipeline of that name."""
    try:
        pipeline_class(class_name or "")
    except ModelNotFound:
        return False
    return True


def pipeline_class(class_name: str) -> type[DiffusionPipeline]:
    """The Diffusers pipeline of that name.

    Raises:
        ModelNotFound: there is none, or what it is made of is not installed.
    """
    known = [name for name in dir(diffusers) if name.endswith("Pipeline")]
    try:
        found = getattr(diffusers, class_name, None) if class_name in known else None
    except (ImportError, RuntimeError) as error:  # what a lazy import of the library raises
        raise ModelNotFound(
            f"_class_name={class_name!r}: Diffusers {diffusers.__version__} cannot import this "
            f"pipeline: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, DiffusionPipeline)):
        raise ModelNotFound(
            f"_class_name={class_name!r}: Diffusers {diffusers.__version__} has no such pipeline."
            f"{did_you_mean(class_name, known)}"
        )
    return found


def signature_of(cls: type[DiffusionPipeline]) -> CallSignature:
    """The named parameters of a pipeline's call; a ``**kwargs`` takes nothing that is known."""
    parameters = inspect.signature(cls.__call__).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return CallSignature(
        cls.__name__,
        {p.name: p.default for p in parameters if p.kind in named and p.name != "self"},
    )
