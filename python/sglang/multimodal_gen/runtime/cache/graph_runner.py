"""How the loop calls its denoiser: directly, or by replaying a recording of its GPU work.

A denoiser of 57 blocks queues over a thousand kernels a step, and the host needs longer to queue
them than two GPUs to run them. A CUDA graph queues them all at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

MAX_GRAPHS = 4
"""Recordings kept: sizes and text lengths in use at a time, the last used ones."""
MAX_SEEN = 64
"""Kinds of calls remembered that came once; a second call of a kind is recorded."""

Kwargs = Mapping[str, Any]
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Caller(Protocol):
    """Calls a denoiser: kwargs of its forward -> its prediction, a tensor of the caller's own."""

    def __call__(self, denoiser: nn.Module, kwargs: Kwargs) -> Tensor:
        """The prediction."""
        ...


def call_plainly(denoiser: nn.Module, kwargs: Kwargs) -> Tensor:
    """One forward. Diffusers' classes return a tuple or a record, whose first entry it is."""
    output = denoiser(**kwargs)
    return output if isinstance(output, Tensor) else output[0]


class Recording(Protocol):
    """Recorded GPU work: reads where the inputs lay when it was recorded."""

    @property
    def output(self) -> Tensor:
        """Where the last replay left the result; the next replay of any recording overwrites it."""
        ...

    def replay(self) -> None:
        """Queue the work."""
        ...


class GraphBackend(Protocol):
    """What records GPU work."""

    device: torch.device

    def record(self, call: Callable[[], Tensor], what: str) -> Recording:
        """Record ``call``, which reads tensors that stay where they are; ``what`` names it."""
        ...

    def forget(self) -> None:
        """No recording is left: give their memory back."""
        ...


@dataclass(slots=True)
class GraphCounters:
    """What a runner did: the proof that a mechanism ran."""

    direct: int = 0
    captures: int = 0
    replays: int = 0
    drops: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    inputs: tuple[Tensor, ...]
    recording: Recording


class GraphRunner:
    """Calls denoisers; from a kind of call's second time on it is recorded, then replayed.

    Calls are of one kind if their arguments differ in nothing but the values of tensors: same tree,
    shapes, dtypes and constants. The first call of a kind runs directly, and compiles or connects
    whatever must be. Inputs are copied into the recording's own tensors before each replay (a few
    microseconds; tensors of inference mode do not tell whether they were changed). The result is a
    copy: guidance holds one prediction while it asks for the next.

    A call runs directly, always, if a tensor is not on the backend's device or an argument is an
    object that the runner does not know. A forward hook on the denoiser makes another kind of call,
    and sees direct and recorded calls, not replays. Recordings read the weights where they are:
    whoever moves or adapts them calls `drop`.

    Not for several threads: the worker runs one batch at a time.

    Args:
        backend: what records.
        limit: recordings kept, at least 1. They share one pool of memory, as large as the most
            demanding of them, besides their inputs and results.
    """

    def __init__(self, backend: GraphBackend, *, limit: int = MAX_GRAPHS) -> None:
        if limit < 1:
            raise ValueError(f"limit={limit}: a runner that keeps no graph records for nothing")
        self.backend = backend
        self.limit = limit
        self.counters = GraphCounters()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        """Recordings held."""
        return len(self._entries)

    def __call__(self, denoiser: nn.Module, kwargs: Kwargs) -> Tensor:
        """The prediction; a tensor that no later call touches."""
        tensors: list[Tensor] = []
        arguments = _kind(kwargs, tensors)
        if arguments is None or any(x.device != self.backend.device for x in tensors):
            self.counters.direct += 1
            return call_plainly(denoiser, kwargs)
        key = (denoiser, _hooks(denoiser), arguments)
        entry = self._entries.get(key)
        if entry is None:
            if key not in self._seen:
                self._see(key)
                self.counters.direct += 1
                return call_plainly(denoiser, kwargs)
            entry = self._record(key, denoiser, kwargs, tensors)
        else:
            _copy(tensors, entry.inputs)
        self._entries.move_to_end(key)
        entry.recording.replay()
        self.counters.replays += 1
        return entry.recording.output.clone()

    def drop(self) -> None:
        """Forget all recordings and kinds: weights changed, or the ranks part."""
        self._seen.clear()
        if self._entries:
            self._entries.clear()
            self.backend.forget()
            self.counters.drops += 1

    def _see(self, key: Hashable) -> None:
        self._seen[key] = None
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    def _record(
        self, key: Hashable, denoiser: nn.Module, kwargs: Kwargs, tensors: list[Tensor]
    ) -> _Entry:
        # Room first: the memory of the one that leaves serves the one that comes.
        while len(self._entries) >= self.limit:
            self._entries.popitem(last=False)
            if not self._entries:
                self.backend.forget()  # a pool without a recording is not taken up again
        with torch.inference_mode(False):  # ordinary tensors: whoever calls next may write to them
            inputs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors)
        _copy(tensors, inputs)
        stays = _with_tensors(kwargs, iter(inputs))
        what = type(denoiser).__name__
        recording = self.backend.record(lambda: call_plainly(denoiser, stays), what)
        self.counters.captures += 1
        entry = self._entries[key] = _Entry(inputs, recording)
        return entry


def _hooks(denoiser: nn.Module) -> tuple[int, ...]:
    return (*denoiser._forward_pre_hooks, *denoiser._forward_hooks)


def _kind(value: Any, tensors: list[Tensor]) -> Hashable | None:
    """What identifies a kind of argument, and its tensors in order; None where that is unknown."""
    if type(value) is Tensor or type(value) is nn.Parameter:
        tensors.append(value)
        return (Tensor, value.shape, value.dtype)
    if isinstance(value, _CONSTANTS):
        return (type(value), value)
    if isinstance(value, Mapping):
        names = tuple(value)
        parts = tuple(_kind(value[name], tensors) for name in names)
        return None if None in parts else (type(value), names, parts)
    if isinstance(value, tuple | list):
        parts = tuple(_kind(item, tensors) for item in value)
        return None if None in parts else (type(value), parts)
    return None


def _with_tensors(value: Any, tensors: Any) -> Any:
    """The same tree with other tensors, taken in `_kind`'s order."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        return {name: _with_tensors(item, tensors) for name, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_with_tensors(item, tensors) for item in value]
        make = getattr(value, "_make", type(value))
        return make(items)
    return value


@torch.no_grad()
def _copy(sources: list[Tensor], targets: tuple[Tensor, ...]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)
