"""Stored tensors, read from a memory map in file order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sglang.multimodal_gen.runtime.layers.shard import Shard
from sglang.multimodal_gen.runtime.loader.safetensors_header import StoredTensor
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

# Pages of a map that were read count as this process's memory until the map closes. Opening the
# file anew after each window bounds that: without it, loading N bytes peaks at 2 N on a CPU.
WINDOW_BYTES = 64 << 20


class TensorReader:
    """Context manager over the safetensors files of a checkpoint; holds one file open at a time.

    What it reads are views of the file: copy them, do not keep them. A page of the file is read
    when a view of it is copied, so that a slice costs what it holds.
    """

    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self.bytes_read = 0
        self._window_bytes = window_bytes
        self._file: Path | None = None
        self._handle: Any = None
        self._read_in_window = 0
        self._open = ExitStack()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def read(self, name: str, stored: StoredTensor) -> torch.Tensor:
        """The stored tensor, on the CPU, in its stored dtype."""
        with self._opened(name, stored):
            tensor = self._handle.get_tensor(name)
        self._count(stored.nbytes, stored.nbytes)
        return tensor

    def read_pieces(self, name: str, stored: StoredTensor, shard: Shard) -> list[torch.Tensor]:
        """The pieces of a stored tensor that make up a rank's slice along ``shard.dim``."""
        before = (slice(None),) * shard.dim
        with self._opened(name, stored):
            whole = self._handle.get_slice(name)
            pieces = [whole[(*before, slice(start, stop))] for start, stop in shard.pieces]
        held = sum(piece.nbytes for piece in pieces)
        # A piece of each row touches every page, where rows are no longer than one.
        self._count(held, stored.nbytes if shard.dim else held)
        return pieces

    @contextmanager
    def _opened(self, name: str, stored: StoredTensor) -> Iterator[None]:
        """Inside, the handle is of the tensor's file; what safetensors raises names both."""
        if self._file != stored.file or self._read_in_window >= self._window_bytes:
            self._reopen(stored.file)
        try:
            yield
        except SafetensorError as problem:
            raise CheckpointError(
                f"Tensor {name!r} ({stored.dtype}) of {stored.file} cannot be read: {problem}."
            ) from problem

    def _count(self, read: int, mapped: int) -> None:
        self.bytes_read += read
        self._read_in_window += mapped

    def _reopen(self, file: Path) -> None:
        self._close()
        try:
            self._handle = self._open.enter_context(safe_open(file, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as problem:
            raise CheckpointError(f"{file} cannot be read: {problem}.") from problem
        self._file = file

    def _close(self) -> None:
        self._open.close()
        self._handle = None
        self._file = None
        self._read_in_window = 0
