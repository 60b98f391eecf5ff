"""The reference: another library's pipeline on the same folder, watched while it runs."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sglang.multimodal_gen.runtime.diffusers_backend.call_signature import pipeline_class
from sglang.multimodal_gen.runtime.diffusers_backend.loading import (
    check_components,
    load_pipeline,
)
from sglang.multimodal_gen.runtime.loader.model_source import ModelSource
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import (
    InvalidArgument,
    ModelNotFound,
    UserError,
)
from sglang.multimodal_gen.runtime.verify.quiet_library import no_library_bars
from sglang.multimodal_gen.runtime.verify.request import Request
from sglang.multimodal_gen.runtime.verify.run_record import RunRecord, recorded_run

DIFFUSERS, NONE = "diffusers", "none"


class Reference:
    """A loaded pipeline of Diffusers, or an object that is called like one.

    It has the components by their names in ``model_index.json`` as attributes, a scheduler in
    Diffusers' interface, and a ``__call__`` that returns a record with ``images`` [B, 3, H, W], or
    ``frames`` [B, F, 3, H, W], in 0..1 for ``output_type="pt"``.
    """

    def __init__(
        self, name: str, pipeline: Any, denoisers: Sequence[str], decoder: str | None, device: str
    ) -> None:
        self.name = name
        self.pipeline = pipeline
        self.device = device
        self.denoisers: list[nn.Module] = [
            getattr(pipeline, n) for n in denoisers if getattr(pipeline, n, None) is not None
        ]
        self.decoder = None if decoder is None else getattr(pipeline, decoder, None)
        if not self.denoisers or self.decoder is None:
            raise UserError(
                f"{name} has no component called {' or '.join([*denoisers, str(decoder)])}, where "
                "the port has its denoiser and decoder: the two cannot be compared"
            )
        call = inspect.signature(type(pipeline).__call__).parameters
        self.takes = frozenset(call)

    def fitting(self, request: Request) -> Request:
        """The request without the fields that this reference does not know."""
        asked = [*request.values, *(["image"] if request.image is not None else [])]
        unknown = [name for name in asked if name not in (*self.takes, "seed")]
        return request.without(*unknown)

    def run(self, request: Request) -> RunRecord:
        """Run one request; a failure of the reference is the user's to see."""
        arguments = {k: v for k, v in request.values.items() if k != "seed"}
        if request.image is not None:
            arguments["image"] = request.image.copy()
        arguments["generator"] = torch.Generator("cpu").manual_seed(request.values["seed"])
        scheduler = self.pipeline.scheduler
        with recorded_run(self.denoisers, self.decoder, type(scheduler)) as record:
            try:
                result = self.pipeline(**arguments, output_type="pt")
            except (ValueError, TypeError, RuntimeError, AttributeError, KeyError) as error:
                raise UserError(
                    f"the reference {self.name} failed by itself: {type(error).__name__}: {error}"
                ) from error
        if not record.calls or not record.decodes or not record.steps:
            raise UserError(
                f"the reference {self.name} ran without calling its denoiser, its scheduler and "
                "its decoder under the names of the checkpoint: it cannot be compared"
            )
        scheduler = self.pipeline.scheduler
        timesteps: torch.Tensor = scheduler.timesteps.detach().cpu().clone()
        record.timesteps = timesteps
        sigmas = getattr(scheduler, "sigmas", None)
        if isinstance(sigmas, torch.Tensor):
            record.sigmas = sigmas[: len(timesteps)].detach().cpu().clone()
        made = result.frames if hasattr(result, "frames") else result.images
        record.pixels = made.detach().float().cpu()
        return record


def check_reference(choice: str, source: ModelSource) -> str:
    """The name of the reference that ``--reference`` means; loads nothing.

    Raises:
        InvalidArgument: it is neither ``diffusers``, ``none`` nor ``MODULE:CLASS``.
        ModelNotFound: Diffusers has no pipeline of the checkpoint's name; says what else there is.
    """
    if choice == DIFFUSERS:
        try:
            return f"diffusers.{pipeline_class(source.class_name or '').__name__}"
        except ModelNotFound as error:
            raise ModelNotFound(
                f"--reference diffusers: {error} Name the model's own with --reference "
                "MODULE:CLASS, or check without one: --reference none"
            ) from None
    return f"{_class(choice).__module__}.{_class(choice).__name__}"


def load_reference(
    choice: str,
    source: ModelSource,
    server_args: ServerArgs,
    denoisers: Sequence[str],
    decoder: str | None,
) -> Reference:
    """Load the reference in fp32 on the device.

    Raises:
        CheckpointError: its library cannot load the folder.
    """
    name = check_reference(choice, source)
    device = server_args.platform.device
    if choice == DIFFUSERS:
        check_components(source)
        pipeline: Any = load_pipeline(source, server_args, None)
    else:
        with no_library_bars():
            pipeline = _class(choice).from_pretrained(str(source.root), dtype=torch.float32)
        if hasattr(pipeline, "to"):
            pipeline = pipeline.to(device) or pipeline
    return Reference(name, pipeline, denoisers, decoder, device)


def _class(choice: str) -> Any:
    module, colon, name = choice.partition(":")
    if not (module and colon and name):
        problem = "use diffusers, none, or the MODULE:CLASS of a reference pipeline"
        raise InvalidArgument("--reference", choice, problem)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise InvalidArgument("--reference", choice, f"cannot be imported: {error}") from error
    if not hasattr(found, "from_pretrained"):
        problem = f"{module} has no class {name} with a from_pretrained(folder, dtype)"
        raise InvalidArgument("--reference", choice, problem)
    return found
