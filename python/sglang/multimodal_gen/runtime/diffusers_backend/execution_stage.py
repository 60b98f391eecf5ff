"""The stage that hands a batch to a Diffusers pipeline, and takes pictures back."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from diffusers import SchedulerMixin
from PIL import Image
from torch import Tensor

from sglang.multimodal_gen.runtime.diffusers_backend.call_arguments import (
    calls_of,
    extra_arguments,
    refused_field,
)
from sglang.multimodal_gen.runtime.diffusers_backend.call_signature import CallSignature
from sglang.multimodal_gen.runtime.diffusers_backend.library_messages import library_messages
from sglang.multimodal_gen.runtime.diffusers_backend.settings import DiffusersPipelineConfig
from sglang.multimodal_gen.runtime.pipelines_core.role import RoleType
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.utils.errors import (
    Cancelled,
    DiffusionError,
    InvalidRequest,
    NonFiniteOutput,
    UserError,
)

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.server_args import ServerArgs


logger = logging.getLogger(__name__)


class DiffusersExecutionStage(PipelineStage):
    """Text encoding, denoising and decoding in one call of the Diffusers pipeline.

    Each call runs on copies of the pipeline's schedulers and on a random state of its own (some
    schedulers draw from the global one), so that no request is felt by the next.
    """

    role_affinity = RoleType.DENOISER
    uses = ()
    reads = frozenset(
        {"request", "prompt", "seeds", "generator", "condition_image", "control", "warnings"}
    )
    writes = frozenset({"output"})

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline

    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        """Writes float32 pixels [B, 3, H, W] in 0..1, on the CPU.

        Raises:
            InvalidRequest: the pipeline refused a value (its ValueError), or failed on arguments
                that were passed through unchecked.
            UserError: it makes something other than pictures.
            NonFiniteOutput: a picture holds NaN or infinity.
        """
        config = self.pipeline_config(server_args)
        assert isinstance(config, DiffusersPipelineConfig)
        assert config.signature is not None
        signature = config.signature
        if batch.control.cancelled.is_set():
            raise Cancelled("stopped by the caller before the first step")
        if "generator" not in signature:
            batch.warnings.append(f"{signature.class_name} takes no generator: seeds do not count")
        calls = calls_of(batch, signature)
        pictures = []
        with library_messages() as messages:
            for index, arguments in enumerate(calls):
                steps = _Steps(batch, signature, index, len(calls), arguments)
                arguments |= steps.arguments()
                with (
                    _fresh_schedulers(self.pipeline),
                    _own_random_state(batch.seeds[index], server_args.platform.device),
                ):
                    result = self._run(arguments, signature, extra_arguments(batch.request))
                steps.finish()
                pictures.append(_pixels(result, signature))
                batch.warnings += _blacked_out(result)
        batch.warnings += [m for m in messages if m not in batch.warnings]
        batch.control.report("decode", batch.batch_size, batch.batch_size, "decoding")
        batch.output = torch.cat(pictures)
        if len(batch.output) != batch.batch_size:
            raise UserError(
                f"{signature.class_name} made {len(batch.output)} pictures of "
                f"{batch.batch_size} asked for; use --batching-max-size 1"
            )
        return batch

    def _run(
        self, arguments: dict[str, Any], signature: CallSignature, extra: Mapping[str, Any]
    ) -> Any:
        try:
            return self.pipeline(**arguments)
        except DiffusionError:
            raise
        except ValueError as error:  # how pipelines refuse what they check
            message = " ".join(str(error).split())
            about = refused_field(message, arguments)
            if about is None:
                raise UserError(f"{signature.class_name} refused the request: {message}") from error
            problem = f"refused by {signature.class_name}: {message}"
            raise InvalidRequest(*about, problem) from error
        except (TypeError, AttributeError, LookupError) as error:
            if not extra:
                raise
            # How a value of a wrong kind shows that a pipeline does not check.
            logger.warning("%s failed on its arguments", signature.class_name, exc_info=error)
            message = " ".join(str(error).split())
            problem = (
                f"{signature.class_name} failed with what was passed through "
                f"({', '.join(extra)}): {type(error).__name__}: {message}. The log has the "
                "traceback"
            )
            raise InvalidRequest("diffusers_kwargs", dict(extra), problem) from error


class _Steps:
    """Hears of each step from the pipeline, tells the caller, and stops it if asked to."""

    def __init__(
        self,
        batch: Req,
        signature: CallSignature,
        index: int,
        calls: int,
        arguments: dict[str, Any],
    ) -> None:
        self.control = batch.control
        self.signature = signature
        self.index = index
        self.calls = calls
        default = signature.defaults.get("num_inference_steps")
        self.asked = arguments.get("num_inference_steps", default)

    def arguments(self) -> dict[str, Any]:
        """What the call gets for it, as far as the pipeline can: pixels as numbers, a callback."""
        wanted: dict[str, Any] = {"output_type": "np"}
        if "callback_on_step_end" in self.signature:
            wanted["callback_on_step_end"] = self.on_step_end
        else:
            wanted["callback"] = self.on_old_step_end
        return {name: value for name, value in wanted.items() if name in self.signature}

    def on_step_end(self, pipeline: Any, step: int, timestep: Any, tensors: Any) -> dict[str, Any]:
        """Diffusers' ``callback_on_step_end``; changes nothing."""
        self._report(step, getattr(pipeline, "num_timesteps", None))
        return {}

    def on_old_step_end(self, step: int, timestep: Any, latents: Any) -> None:
        """The ``callback`` of pipelines that have no ``callback_on_step_end``."""
        self._report(step, None)

    def finish(self) -> None:
        """The call is over: the first that is heard of it where the pipeline has no callback."""
        if not {"callback_on_step_end", "callback"} & self.signature.defaults.keys():
            self.control.report("denoise", self.index + 1, self.calls, "denoising")

    def _report(self, step: int, total: int | None) -> None:
        if not isinstance(total, int):
            total = self.asked if isinstance(self.asked, int) else step + 1
        total = max(total, step + 1)
        done = self.index * total + step + 1
        self.control.report("denoise", done, self.calls * total, "denoising")


@contextlib.contextmanager
def _fresh_schedulers(pipeline: Any) -> Iterator[None]:
    """Copies stand in for the pipeline's schedulers during one call."""
    kept = {n: c for n, c in pipeline.components.items() if isinstance(c, SchedulerMixin)}
    try:
        for name, scheduler in kept.items():
            setattr(pipeline, name, copy.deepcopy(scheduler))
        yield
    finally:
        for name, scheduler in kept.items():
            setattr(pipeline, name, scheduler)


@contextlib.contextmanager
def _own_random_state(seed: int, device: str) -> Iterator[None]:
    """The global random state is the request's for one call, and the caller's again after it."""
    with torch.random.fork_rng([] if device == "cpu" else [device]):
        torch.manual_seed(seed)
        yield


def _pixels(result: Any, signature: CallSignature) -> Tensor:
    """Float32 [B, 3, H, W] in 0..1 of whatever kind of picture a pipeline returns."""
    images = getattr(result, "images", None)
    if images is None or len(images) == 0:
        raise UserError(
            f"{signature.class_name} returned {type(result).__name__} without pictures; only "
            "pipelines that make images run here"
        )
    if isinstance(images, Tensor):
        array = images.float().cpu().permute(0, 2, 3, 1).numpy()
    elif isinstance(images, np.ndarray):
        array = images
    else:
        array = np.stack([_from_one(image) for image in images])
    if array.ndim == 3:
        array = array[..., None]
    if array.shape[-1] == 1:
        array = array.repeat(3, axis=-1)
    if array.ndim != 4 or array.shape[-1] != 3:
        raise UserError(
            f"{signature.class_name} returned pixels of shape {array.shape}; only grey and RGB "
            "pictures are taken"
        )
    pixels = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
    if not torch.isfinite(pixels).all():
        raise NonFiniteOutput(
            "the picture holds NaN or infinity: a component overflowed in its precision; try "
            "--precision fp32, or --component-precisions.vae fp32"
        )
    return pixels.clamp(0, 1).permute(0, 3, 1, 2)


def _from_one(image: Any) -> np.ndarray:
    if isinstance(image, Image.Image):
        return np.asarray(image.convert("RGB"), dtype=np.float32) / 255
    return np.asarray(image, dtype=np.float32)


def _blacked_out(result: Any) -> list[str]:
    flags = getattr(result, "nsfw_content_detected", None) or []
    return [
        f"picture {index + 1} was blacked out by the checkpoint's safety checker"
        for index, flagged in enumerate(flags)
        if flagged
    ]
