"""What is checked of a family when it is registered, so that one bad package is told by its name.

Without this, a declaration that cannot be used is found by whoever lists or looks up models next.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError

_BROKEN = (ArithmeticError, AttributeError, LookupError, NameError, RuntimeError, TypeError,
           ValueError)  # fmt: skip
"""What a detector or a config class raises that was never tried."""


def check_registration(
    pipeline_config_cls: type[Any],
    hf_model_paths: Sequence[str] | None,
    model_detectors: Sequence[Any] | None,
) -> None:
    """Refuse a family that listings and look-ups would stumble over.

    Raises:
        PipelineDefinitionError: its config class cannot be made without arguments or declares no
            sound tasks, a path is no text, or a detector does not take one text.
    """
    name = f"{pipeline_config_cls.__module__}.{pipeline_config_cls.__qualname__}"
    try:
        pipeline_config_cls().get_supported_task_types()
    except PipelineDefinitionError as error:
        raise PipelineDefinitionError(f"{name}: {error}") from error
    except _BROKEN as error:
        raise PipelineDefinitionError(
            f"{name} cannot be made without arguments, or asked for its tasks: "
            f"{type(error).__name__}: {error}"
        ) from error
    paths = hf_model_paths or ()
    if isinstance(paths, str) or not all(isinstance(path, str) for path in paths):
        raise PipelineDefinitionError(
            f"hf_model_paths={hf_model_paths!r} of {name} must be a list of ids"
        )
    if callable(model_detectors):
        raise PipelineDefinitionError(
            f"model_detectors={model_detectors!r} of {name} must be a list of functions"
        )
    for detector in model_detectors or ():
        _check_detector(name, detector)


def _check_detector(name: str, detector: Any) -> None:
    """It is called once, with a text that nobody's model has."""
    if not callable(detector):
        raise PipelineDefinitionError(f"the detector {detector!r} of {name} is no function")
    try:
        inspect.signature(detector).bind("")
    except TypeError as error:
        raise PipelineDefinitionError(
            f"the detector {detector!r} of {name} must take one argument, a text: {error}"
        ) from error
    except ValueError:
        pass  # built-in functions have no signature
    try:
        detector("")
    except _BROKEN as error:
        raise PipelineDefinitionError(
            f"the detector {detector!r} of {name} fails on a text: {type(error).__name__}: {error}"
        ) from error
