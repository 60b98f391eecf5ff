"""Batches on their way between processes: pixels as raw bytes, callers' ends left behind."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch, Req


def sendable(batch: Req) -> Req:
    """A copy without its control, which stays with the caller; a rank puts its own there."""
    sent = copy.copy(batch)
    sent.control = cast(Any, None)
    sent.resume_from = None  # ranks keep no states of the loop, and take none up
    return sent


def packed(output: OutputBatch) -> OutputBatch:
    """An output whose pixels are an array: a channel sends those without copying them."""
    return replace(output, output=cast(Any, np.ascontiguousarray(output.output.numpy())))


def unpacked(output: OutputBatch, peaks: list[float]) -> OutputBatch:
    """The output as the pipeline made it, with the highest peak of memory of all its ranks."""
    pixels = torch.from_numpy(cast(np.ndarray, output.output))
    return replace(output, output=pixels, peak_memory_mb=max(peaks))
