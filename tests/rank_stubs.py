"""A pipeline without a model that does on each rank what its prompt says: ranks import it too."""

from __future__ import annotations

import dataclasses
import faulthandler
import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from sglang.multimodal_gen.configs.pipeline_configs.base import ImagePipelineConfig
from sglang.multimodal_gen.configs.sample.sampling_params import ImageSamplingParams
from sglang.multimodal_gen.registry import ModelInfo
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.loader.model_source import ModelSource
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req, RequestControl
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.pipelines_core.stages.finite import (
    require_finite,
    tell_failure,
)
from sglang.multimodal_gen.runtime.platforms.device import device_facts
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.resolve import resolve
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, InvalidRequest, OutOfMemory

logger = logging.getLogger("sglang.stub")


class ScriptStage(PipelineStage):
    """Runs the request's steps; at the second one the prompt happens.

    A prompt is a verb, and the rank that does it, or ``all``: ``sleep 1``. Each step adds up the
    ranks of the replica, which all must reach it.
    """

    def __init__(self, parallel: ParallelState) -> None:
        self.parallel = parallel
        self.runs = 0

    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        self.runs += 1
        verb, _, who = batch.prompt[0].partition(" ")
        mine = who in ("", "all", str(self.parallel.rank))
        total = batch.num_inference_steps
        batch.control.report("denoise", 0, total, "denoising")
        ranks = torch.ones(1)
        for step in range(total):
            if step == 1 and verb == "memory" and not mine:
                require_finite(torch.zeros(1), "its result", self.parallel.control)
            if step == 1 and mine:
                getattr(self, f"do_{verb}", lambda batch: None)(batch)
            ranks = self.parallel.replica.all_reduce(torch.ones(1))
            batch.control.report("denoise", step + 1, total, "denoising")
            time.sleep(0.02)
        batch.warnings.append(f"pid {os.getpid()} rank {self.parallel.rank} run {self.runs}")
        if not self.parallel.replica.is_first:
            return batch  # as a stage may: the first rank gives the result
        noise = [
            torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(s)) for s in batch.seeds
        ]
        batch.output = torch.stack(noise) / ranks * self.parallel.replica.size
        return batch

    def do_refuse(self, batch: Req) -> None:
        raise InvalidRequest("prompt", batch.prompt[0], "is refused")

    def do_bug(self, batch: Req) -> None:
        raise ZeroDivisionError("a bug")

    def do_exit(self, batch: Req) -> None:
        print("some last words", file=sys.stderr, flush=True)
        os._exit(7)

    def do_kill(self, batch: Req) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def do_crash(self, batch: Req) -> None:
        faulthandler._sigsegv()

    def do_sleep(self, batch: Req) -> None:
        time.sleep(1000)

    def do_stop(self, batch: Req) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def do_work(self, batch: Req) -> None:
        """Busy for longer than any idle rank may be."""
        end = time.monotonic() + 9
        while time.monotonic() < end:
            pass

    def do_await(self, batch: Req) -> None:
        """Each rank waits for a message of the other, and none sends."""
        other = 1 - self.parallel.replica.rank
        for job in self.parallel.replica.exchange({}, {other: torch.empty(1)}):
            job.wait()

    def do_shout(self, batch: Req) -> None:
        print(f"printed by rank {self.parallel.rank}")
        logger.warning("logged by rank %d", self.parallel.rank)
        warnings.warn(f"warned by rank {self.parallel.rank}", stacklevel=1)

    def do_memory(self, batch: Req) -> None:
        """One rank's memory is full; the others learn of it where all look."""
        tell_failure(self.parallel.control)
        raise OutOfMemory("it is too large")

    def do_report(self, batch: Req) -> None:
        batch.control.report("decode", 0, 1, "decoding")


class ScriptPipeline(ComposedPipelineBase):
    """One `ScriptStage`."""

    pipeline_name = "ScriptPipeline"

    def create_pipeline_stages(self, server_args: ServerArgs) -> None:
        if self.model_path == "broken":
            raise CheckpointError("weight 'x' is missing")
        if self.model_path == f"broken on {self.parallel.rank}":
            raise ZeroDivisionError("a bug in a constructor")
        self.add_stage(ScriptStage(self.parallel), "script_stage")


@dataclasses.dataclass
class ScriptParams(ImageSamplingParams):
    height: int | None = 16
    width: int | None = 16
    num_inference_steps: int = 4


def script_model(name: str = "script", **server_args: Any) -> ModelDescription:
    """A description that needs no files; ``name`` may be ``broken``, or ``broken on RANK``."""
    args = ServerArgs.from_flat(model_path=name, device="cpu", precision="fp32", **server_args)
    args = dataclasses.replace(
        resolve(args, device_facts()).args, pipeline_config=ImagePipelineConfig()
    )
    info = ModelInfo(ScriptPipeline, ScriptParams, ImagePipelineConfig)
    source = ModelSource(name, Path(), {}, "folder")
    return ModelDescription(source, info, args, {})


def script(
    model: ModelDescription, *prompts: str, control: RequestControl | None = None, **settings: Any
) -> list[Req]:
    """One batch for each prompt."""
    params = {"seed": 1, **settings}
    found = []
    for prompt in prompts:
        found += model.admit(model.sampling_params({"prompt": prompt, **params}), control)
    return found


def rank_and_sum(worker: Any, start: int) -> tuple[int, float]:
    """For `WorkerGroup.call`: this rank's number from ``start`` on, and a sum over ranks."""
    parallel = worker.pipeline.parallel
    return start + parallel.rank, parallel.replica.all_reduce(torch.ones(1)).item()


def refuse(worker: Any) -> None:
    """For `WorkerGroup.call`: the same failure on every rank."""
    raise InvalidRequest("prompt", "x", "no such prompt")
