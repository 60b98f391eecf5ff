"""A server of the toy family of clips, for tests of the video routes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from runtime.entrypoints.http.conftest import FLAGS, Live, running
from sglang.multimodal_gen.runtime.entrypoints.http.opening import service_of
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.managers.worker import Worker
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch, Req
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.serving import ServingArgs

import toy_clips  # noqa: F401
from toy_clips.checkpoint import write_checkpoint

SMALL = {"prompt": "a red ball", "num_frames": 5, "size": "48x32", "num_inference_steps": 2}


def alike(clip: np.ndarray, other: np.ndarray) -> bool:
    """Whether two clips are of the same seed and prompt, whatever company they were made in.

    A last bit before the lossy codec may be more after it, in a few places; another seed differs
    everywhere: by 5 or 6 of 255 on average, but by no more than 16 or 18 anywhere.
    """
    return np.abs(clip.astype(int) - other).mean() < 0.5


class ToyRunner:
    """The toy model, with a wait at each step and a count of steps and batches."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.step_seconds = 0.0
        self.steps = 0
        self.sizes: list[int] = []
        self.began = threading.Event()

    def run(self, batch: Req) -> OutputBatch:
        transformer = self.worker.pipeline.get_module("transformer")

        def before(*_: Any) -> None:
            self.began.set()
            self.steps += 1
            time.sleep(self.step_seconds)

        hook = transformer.register_forward_pre_hook(before)
        self.sizes.append(batch.batch_size)
        try:
            return self.worker.run(batch)
        finally:
            hook.remove()


def write_model(folder: Path) -> Path:
    return write_checkpoint(folder / "toy-clips")


def describe(folder: Path, **flags: Any) -> ModelDescription:
    args = ServerArgs.from_flat(model_path=str(folder), device="cpu", precision="fp32", **flags)
    return ModelDescription.find(args)


@contextlib.contextmanager
def serving_clips(
    model: ModelDescription, worker: Worker, *, step_seconds: float = 0.0, **flags: Any
) -> Iterator[Live]:
    serving = ServingArgs.from_flat(**FLAGS | {"served_model_name": "toy"} | flags)
    runner = ToyRunner(worker)
    runner.step_seconds = step_seconds
    open_service: Callable[[Any], Any] = lambda kept: service_of(  # noqa: E731
        model, runner, serving, kept
    )
    with running(open_service, serving, runner) as live:
        while live.context.lifecycle.phase == "loading":
            time.sleep(0.005)
        yield live


def post(live: Live, **body: Any) -> dict[str, Any]:
    """A created video."""
    response = live.http.post("/v1/videos", json=SMALL | body)
    assert response.status_code == 200, response.text
    return response.json()


def until(live: Live, video_id: str, *states: str, seconds: float = 30.0) -> dict[str, Any]:
    """The video once it is in one of some states."""
    states = states or ("completed", "failed", "cancelled")
    deadline = time.monotonic() + seconds
    while True:
        video = live.http.get(f"/v1/videos/{video_id}").json()
        if video.get("status") in states:
            return video
        assert time.monotonic() < deadline, video
        time.sleep(0.005)
