"""The port: this runtime's pipeline on the same folder, watched from outside while it runs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
from sglang.multimodal_gen.runtime.loader.components import role_of
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.managers.worker import Worker
from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.utils.errors import DiffusionError, UserError
from sglang.multimodal_gen.runtime.verify.request import Request
from sglang.multimodal_gen.runtime.verify.run_record import RunRecord, recorded_run

EMBEDDINGS = ("prompt_embeds", "pooled_embeds", "negative_prompt_embeds", "neg_pooled_embeds")
DENOISER_ROLES = ("transformer", "unet")


class Port:
    """A loaded native pipeline, and what of it is watched.

    ``worker`` is one that has loaded it already.
    """

    def __init__(self, model: ModelDescription, worker: Worker | None = None) -> None:
        self.model = model
        self.worker = Worker(model) if worker is None else worker
        self.pipeline: ComposedPipelineBase = self.worker.pipeline
        names = denoiser_names(self.pipeline)
        self.denoisers: list[nn.Module] = [
            m for m in map(self.pipeline.get_module, names) if isinstance(m, nn.Module)
        ]
        decoder = decoder_name(type(self.pipeline))
        self.decoder: Any = None if decoder is None else self.pipeline.get_module(decoder)
        if not self.denoisers or self.decoder is None:
            raise UserError(
                f"{type(self.pipeline).__name__} has no component of the role transformer, or none "
                "of the role vae: `sglang verify` cannot watch it"
            )

    @property
    def config(self) -> PipelineConfig:
        """The family's hooks, with the checkpoint's facts."""
        config = self.pipeline.server_args.pipeline_config
        assert config is not None
        return config

    def run(self, request: Request, **more: Any) -> RunRecord:
        """Run one request; a failure of the port is part of the record.

        ``more`` are further sampling fields, such as ``lora``.

        Raises:
            UserError: the port refuses the request before it runs.
        """
        with _request_files(request) as files:
            batch = self._admitted({**request.values, **files, **more})
            scheduler = type(self.pipeline.get_module("scheduler"))
            with (
                recorded_run(self.denoisers, self.decoder, scheduler) as record,
                ExitStack() as stack,
            ):
                record.guided = batch.do_classifier_free_guidance
                for stage in self.pipeline.stages.values():
                    noting = _noting(stage.forward, record)
                    stack.enter_context(patch.object(stage, "forward", noting))
                try:
                    record.pixels = self.worker.run(batch).output
                except DiffusionError as error:
                    record.error = error
        return record

    def picture(self, request: Request, **more: Any) -> Tensor:
        """What the decoder makes of a request, before anything is clipped.

        Raises:
            DiffusionError: the run failed.
        """
        record = self.run(request, **more)
        if record.error is not None:
            raise record.error
        assert record.picture is not None
        return record.picture

    def _admitted(self, values: Mapping[str, Any]) -> Req:
        (batch,) = self.model.admit(self.model.sampling_params(values))
        return batch


def denoiser_names(pipeline: ComposedPipelineBase) -> list[str]:
    """The components of a pipeline that denoise."""
    return [n for n in pipeline.required_config_modules if role_of(n) in DENOISER_ROLES]


def decoder_name(pipeline: type[ComposedPipelineBase]) -> str | None:
    """The component whose ``decode`` turns latents into pixels."""
    return next((n for n in pipeline._required_config_modules if role_of(n) == "vae"), None)


def _noting(forward: Callable[..., Req], record: RunRecord) -> Callable[..., Req]:
    """A stage's forward that then notes what the batch holds of the schedule."""

    def noting(batch: Req, *args: Any, **kwargs: Any) -> Req:
        batch = forward(batch, *args, **kwargs)
        timesteps = getattr(batch, "timesteps", None)
        if timesteps is not None:
            record.timesteps = timesteps.detach().cpu().clone()
        sigmas = getattr(batch.scheduler, "sigmas", None)
        if isinstance(sigmas, torch.Tensor) and record.timesteps is not None:
            record.sigmas = sigmas[: len(record.timesteps)].detach().cpu().clone()
        # Freed after its last reader: what matters is whether it ever was there.
        record.negative_embeds = record.negative_embeds or bool(batch.negative_prompt_embeds)
        for name in EMBEDDINGS:
            for index, value in enumerate(getattr(batch, name, None) or ()):
                if isinstance(value, Tensor):
                    record.embeddings[f"{name}[{index}]"] = value.detach().to("cpu", copy=True)
        shape = getattr(batch, "raw_latent_shape", None)
        if shape is not None:
            record.raw_latent_shape = tuple(shape)
        return batch

    return noting


@contextmanager
def _request_files(request: Request) -> Iterator[dict[str, str]]:
    """The input image as a file, for as long as the request runs."""
    if request.image is None:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "input.png"
        request.image.save(path)
        yield {"image_path": str(path)}
