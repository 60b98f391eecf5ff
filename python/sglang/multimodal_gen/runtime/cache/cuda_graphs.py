"""CUDA graphs as what records, with the collectives of several ranks in them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.utils.errors import OutOfMemory, PipelineDefinitionError


@dataclass(frozen=True, slots=True)
class CudaRecording:
    """A captured graph and where it leaves its result."""

    graph: torch.cuda.CUDAGraph
    output: Tensor

    def replay(self) -> None:
        """Queue it on the current stream."""
        self.graph.replay()


class CudaGraphs:
    """Captures on a stream of its own, into one pool that all captures share.

    They may share it because no two replays run at a time: all are queued on one stream, and their
    results are copied before the next. Weights and inputs lie outside of the pool.

    Args:
        device: the GPU.
        groups: ranks whose messages are in the captured work. All of them capture together: each
            waits for the others before it starts.

    Attributes:
        pool_bytes: device memory that the captures so far took, as the allocator counts it.
    """

    def __init__(self, device: torch.device, groups: Sequence[Group] = ()) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.groups = tuple(groups)
        self.pool_bytes = 0
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def record(self, call: Callable[[], Tensor], what: str) -> CudaRecording:
        """Capture ``call``, after one run of it on the capturing stream.

        Raises:
            PipelineDefinitionError: it does what a graph cannot hold, such as waiting for the GPU.
            OutOfMemory: no room beside the weights.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream, current = self._stream, torch.cuda.current_stream(self.device)
        self._warm_up(call, stream)
        for group in self.groups:
            group.barrier()
        torch.cuda.synchronize(self.device)
        gc.collect()  # what Python collected in the middle of a capture might free device memory
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.device)
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: other threads (NCCL's watchdog, a result on its way) go on as they are.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
            ):
                output = call()
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"no room to record {what} as a CUDA graph ({error}). Make smaller pictures, fewer "
                "at once (batching_max_size), or use --enable-cuda-graph false"
            ) from error
        except RuntimeError as error:
            raise PipelineDefinitionError(
                f"{what} cannot be recorded as a CUDA graph ({error}): its forward waits for the "
                "GPU, copies from host memory or picks by values. --enable-cuda-graph false runs "
                "it without"
            ) from error
        finally:
            torch.cuda.set_stream(current)  # a capture that failed leaves its own in place
        self.pool_bytes += torch.cuda.memory_reserved(self.device) - before
        return CudaRecording(graph, output)

    def forget(self) -> None:
        """Give the pool back; the next capture takes a new one."""
        torch.cuda.synchronize(self.device)
        self._pool = None  # the stream stays: each one that multiplies takes a workspace for good
        self.pool_bytes = 0
        torch.cuda.empty_cache()

    def _warm_up(self, call: Callable[[], Tensor], stream: torch.cuda.Stream) -> None:
        """Whatever happens at a stream's or a shape's first use is to happen before the capture."""
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            call()
        current.wait_stream(stream)
