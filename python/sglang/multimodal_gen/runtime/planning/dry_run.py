"""A run without values: every operation is met, counted, and nothing is computed.

The pipeline's own stages run on the meta device, so what is counted is what they do, in any family.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

BLOCK = 512
"""The CUDA allocator hands out multiples of this many bytes."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operation: its arithmetic, the bytes it reads and writes, and its kind.

    ``kind`` is ``product`` (a matrix product or convolution), ``attention``, or ``elementwise``;
    ``bits`` are those of its widest tensor, of a product those of its narrowest operand.
    """

    kind: str
    flops: float
    nbytes: int
    bits: int


@dataclass(eq=False)
class Tally:
    """What one stretch of a run did: its operations, and the most bytes that were alive at once."""

    kernels: list[Kernel] = field(default_factory=list)
    peak_bytes: int = 0


class DryRun:
    """Counts the operations on meta tensors inside ``with``, stretch by stretch.

    Weights are not counted as memory: they are there before. Only tensors that operations make are.
    """

    def __init__(self) -> None:
        self.live = 0
        self.tally = Tally()
        self._storages: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._modes = (_Values(self), _Operations(self))

    def __enter__(self) -> DryRun:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def start(self) -> Tally:
        """A new stretch begins; what is alive stays alive."""
        self.tally = Tally(peak_bytes=self.live)
        return self.tally

    def count(self, kernel: Kernel) -> None:
        """One operation ran."""
        self.tally.kernels.append(kernel)

    def made(self, tensor: Tensor) -> None:
        """A tensor came to be; its memory goes with the last that shares it."""
        storage = tensor.untyped_storage()
        if storage in self._storages:
            return
        nbytes = -(-storage.nbytes() // BLOCK) * BLOCK
        self._storages[storage] = nbytes
        weakref.finalize(storage, self._freed, nbytes)
        self.live += nbytes
        self.tally.peak_bytes = max(self.tally.peak_bytes, self.live)

    def passing(self, nbytes: int) -> None:
        """Memory that one operation takes for itself and gives back at its end."""
        self.tally.peak_bytes = max(self.tally.peak_bytes, self.live + nbytes)

    def _freed(self, nbytes: int) -> None:
        self.live -= nbytes


class _Operations(TorchDispatchMode):
    """Meets every operation below autograd."""

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        inputs = _meta(tree_leaves((args, kwargs)))
        if func._overloadpacket in _NEAREST:
            # Taken apart it would be an index of all pixels; on a GPU it is one kernel.
            func, args, kwargs = func._overloadpacket.default, _by_size(*args), {}
        elif func._overloadpacket not in flop_registry:
            # In inference mode composed operations arrive whole: a linear is a product in them.
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if func._overloadpacket is torch.ops.aten.convolution:
            out = _as_cudnn_leaves_it(args[0], out)
        outputs = _meta(tree_leaves(out))
        if not inputs and not outputs:
            return out
        before = {tensor.untyped_storage()._cdata for tensor in inputs}
        fresh = [t for t in outputs if t.untyped_storage()._cdata not in before]
        if not fresh and not _writes(func):
            return out  # a view
        packet = func._overloadpacket
        product = packet in flop_registry
        flops = flop_registry[packet](*args, **kwargs, out_val=out) if product else 0
        moved = sum(_nbytes(tensor) for tensor in (*inputs, *outputs))
        # A product runs in the type of its narrowest operand; an addition writes the widest.
        sizes = [t.element_size() * 8 for t in (inputs if product else (*inputs, *outputs))]
        bits = (min if product else max)(sizes, default=8)
        self._run.count(Kernel("product" if product else "elementwise", flops, moved, bits))
        for tensor in fresh:
            self._run.made(tensor)
        if packet is torch.ops.aten.convolution:
            self._change_layout(args[0], out)
        return out

    def _change_layout(self, x: Tensor, out: Tensor) -> None:
        """What a convolution in 16 bits does beside its product where channels come first.

        cuDNN's kernels want channels last: input and output are copied, into a workspace that is as
        large as both. FLUX's VAE on an H200 showed it, before decision 0043 gave its maps channels
        last: this made 1.87 GiB of peak the 2.38 measured, and so at four times the pixels. What
        still comes here are layers that keep the library's order: bands of rows on several ranks.
        """
        last = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
        if x.element_size() != 2 or x.ndim not in (4, 5) or x.is_contiguous(memory_format=last):
            return
        workspace = _nbytes(x) + _nbytes(out)
        self._run.count(Kernel("elementwise", 0, 2 * workspace, x.element_size() * 8))
        self._run.passing(workspace)


def _as_cudnn_leaves_it(x: Tensor, out: Tensor) -> Tensor:
    """A convolution's result in the order of its input, which torch forgets in three dimensions."""
    last = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
    if x.ndim not in (4, 5) or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return out
    return torch.empty_like(out, memory_format=last)


class _Values(TorchFunctionMode):
    """Stands in where the program asks for values, and keeps attention in one piece.

    Values read as zero, and conditions as true: nothing in a run of finite numbers depends on them.
    """

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention and args[0].is_meta:
            return self._attend(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.is_meta:
            stand_in = _STAND_INS.get(resolve_name(func) or "")
            if stand_in is not None:
                return stand_in(first)
            if func is Tensor.to and _to_host(args[1:], kwargs):
                return _zeros(first)
        return func(*args, **kwargs)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """One kernel that keeps no scores: flash, or cuDNN's."""
        out = torch.empty_strided((*q.shape[:-1], v.shape[-1]), _strides(q, v), dtype=q.dtype,
                                  device="meta")  # fmt: skip
        flops = 2.0 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        moved = sum(map(_nbytes, (q, k, v, out)))
        self._run.tally.kernels.pop()  # the allocation above is not a kernel
        self._run.count(Kernel("attention", flops, moved, q.element_size() * 8))
        return out


def _strides(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """Of [B, H, S, D] that lies as [B, S, H, D], as the kernels give it."""
    heads, length, width = q.shape[1], q.shape[2], v.shape[-1]
    return (length * heads * width, width, heads * width, 1)


_STAND_INS: Mapping[str, Callable[[Tensor], Any]] = {
    "torch.Tensor.__bool__": lambda x: True,
    "torch.Tensor.item": lambda x: _zeros(x).item(),
    "torch.Tensor.tolist": lambda x: _zeros(x).tolist(),
    "torch.Tensor.numpy": lambda x: _zeros(x).numpy(),
    "torch.Tensor.cpu": lambda x: _zeros(x),
}


_NEAREST = tuple(
    getattr(torch.ops.aten, f"{name}{dims}d")
    for name in ("upsample_nearest", "_upsample_nearest_exact")
    for dims in (1, 2, 3)
)


def _by_size(
    x: Tensor, size: Sequence[int] | None, scales: Sequence[float] | float | None = None, *_: Any
) -> tuple[Tensor, Sequence[int]]:
    """The arguments of an upsampling, with the size of its result in place of scales."""
    if size is None:
        assert isinstance(scales, Sequence), "one of the two is given"
        size = [int(s * scale) for s, scale in zip(x.shape[2:], scales, strict=True)]
    return x, size


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype)


def _to_host(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    wanted = [a for a in (*args, *kwargs.values()) if isinstance(a, str | torch.device)]
    return any(torch.device(device).type == "cpu" for device in wanted)


def _meta(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_meta]


def _writes(func: Any) -> bool:
    """Whether an operation changes one of its arguments."""
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def _nbytes(tensor: Tensor) -> int:
    """Bytes of memory behind a tensor: what is expanded is read once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()
