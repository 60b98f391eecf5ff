"""What a caller and an operator may set where Diffusers runs the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
from sglang.multimodal_gen.configs.sample.sampling_params import (
    ImageSamplingParams,
    SamplingParams,
)
from sglang.multimodal_gen.configs.task_type import ModelTaskType
from sglang.multimodal_gen.runtime.diffusers_backend.call_arguments import check_call
from sglang.multimodal_gen.runtime.diffusers_backend.call_signature import (
    CallSignature,
    pipeline_class,
)
from sglang.multimodal_gen.runtime.diffusers_backend.library_adapters import no_adapters
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, InvalidRequest
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean


@dataclass
class DiffusersSamplingParams(ImageSamplingParams):
    """The shared settings; what is left out keeps the default of the Diffusers pipeline."""

    prompt_optional: ClassVar[bool] = True  # not every pipeline has one: the signature decides

    num_inference_steps: int | None = field(default=None)  # pyright: ignore[reportIncompatibleVariableOverride]
    guidance_scale: float | None = field(default=None)  # pyright: ignore[reportIncompatibleVariableOverride]
    diffusers_kwargs: dict[str, Any] | None = field(
        default=None,
        metadata={"help": "Further arguments of the Diffusers pipeline's call, by name."},
    )

    def check(self) -> None:
        """The shared checks, and that further arguments have names."""
        super().check()
        extra = self.diffusers_kwargs
        named = isinstance(extra, Mapping) and all(isinstance(name, str) for name in extra)
        if extra is not None and not named:
            raise InvalidRequest("diffusers_kwargs", extra, "must map argument names to values")


@dataclass
class DiffusersPipelineConfig(PipelineConfig):
    """A pipeline that Diffusers runs from end to end: it has no hooks, only its call's signature.

    Serves text to image, and with an ``image`` parameter also image to image.
    """

    opaque: ClassVar[bool] = True
    SETTINGS: ClassVar[tuple[str, ...]] = ("dit_precision", "max_pixels", "scheduler")

    signature: CallSignature | None = None
    """Of the pipeline that the checkpoint names; known once the checkpoint is."""
    scheduler: str = ""
    """A scheduler class in place of the checkpoint's, made from its settings; empty keeps it."""

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """A copy with an operator's settings; those of single stages have no meaning here.

        Raises:
            InvalidArgument: a name is unknown or has no effect.
        """
        for name, value in settings.items():
            if name not in self.SETTINGS:
                raise InvalidArgument(
                    f"pipeline_config.{name}",
                    value,
                    "has no effect where Diffusers runs the model."
                    f"{did_you_mean(name, self.SETTINGS)} It takes: {', '.join(self.SETTINGS)}",
                )
        return super().with_settings(settings)

    def get_supported_task_types(self) -> tuple[ModelTaskType, ...]:
        """Text to image; with a parameter for it, an input image too."""
        if self.task_type is ModelTaskType.TI2I:
            return (ModelTaskType.TI2I, ModelTaskType.T2I, ModelTaskType.I2I)
        return (self.task_type,)

    def check_request(self, params: SamplingParams) -> None:
        """Refuse, before anything is loaded, what the pipeline's call does not take."""
        assert self.signature is not None
        check_call(params, self.signature)
        if params.lora_choices:
            problem = no_adapters(pipeline_class(self.signature.class_name))
            if problem is not None:
                raise InvalidRequest("lora", params.lora_choices[0].adapter, problem)
