"""Weights streamed from safetensors into a module, one tensor at a time.

Each tensor goes from the memory map straight to its device and dtype; of a parameter that is a
slice (`Shard`), only that slice. There is no state dict of the whole checkpoint, on any device: the
peak is the finished module, one tensor and one window of the map: of weights that are held in eight
bits, that tensor alone is ever there in its stored type. The module ends up independent of the
files: they may change or vanish afterwards.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from sglang.multimodal_gen.runtime.layers.ops.fp8_rows import E4M3
from sglang.multimodal_gen.runtime.layers.quantization.fp8 import quantizer_of
from sglang.multimodal_gen.runtime.layers.shard import Shard, shard_of
from sglang.multimodal_gen.runtime.loader.checkpoint import Checkpoint, listed
from sglang.multimodal_gen.runtime.loader.eight_bit_values import eight_bit, widened
from sglang.multimodal_gen.runtime.loader.key_match import (
    KeyMatch,
    Slot,
    match_keys,
    rename_by_table,
)
from sglang.multimodal_gen.runtime.loader.safetensors_header import StoredTensor
from sglang.multimodal_gen.runtime.loader.stored_fp8 import sort_stored
from sglang.multimodal_gen.runtime.loader.tensor_reader import TensorReader
from sglang.multimodal_gen.runtime.loader.transformers_keys import (
    is_transformers_model,
    transformers_ignored,
    transformers_rename,
)
from sglang.multimodal_gen.runtime.memory.weight_group import WeightSpec
from sglang.multimodal_gen.runtime.memory.weight_home import WeightHome
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, PipelineDefinitionError
from sglang.multimodal_gen.runtime.utils.progress import ProgressEvent, ProgressListener

DtypeRule = Callable[[str], torch.dtype]


@dataclass(frozen=True, slots=True)
class LoadReceipt:
    """What one component's load did.

    ``dtypes`` counts tensors by ``"BF16 -> float32"``; ``ignored`` are stored names that the
    module does not want and may leave; ``unused`` safetensors files of the folder not read;
    ``bytes_read`` is what this rank read as stored, headers not counted; ``sharded`` how many of
    the ``tensors`` it holds a slice of.
    """

    component: str
    files: tuple[Path, ...]
    bytes_read: int
    tensors: int
    dtypes: Mapping[str, int]
    ignored: tuple[str, ...] = ()
    unused: tuple[Path, ...] = ()
    sharded: int = 0

    def dtype_table(self) -> str:
        """The dtype counts in one line, most frequent first."""
        rows = sorted(self.dtypes.items(), key=lambda row: (-row[1], row[0]))
        return ", ".join(f"{count} {conversion}" for conversion, count in rows)


def load_weights(
    module: nn.Module,
    checkpoint: Checkpoint,
    *,
    device: str,
    dtype: torch.dtype,
    label: str,
    progress: ProgressListener | None = None,
    home: WeightHome | None = None,
    exact: bool = False,
) -> LoadReceipt:
    """Fill a module that was built on meta; afterwards it is whole, frozen and in eval mode.

    Args:
        module: from ``build_on_meta``, with the slices that this rank holds where a plan was
            applied; of no use after an error. Its class may carry
            ``checkpoint_names`` (pattern -> replacement, stored names to module names),
            ``_keep_in_fp32_modules``, ``_keep_in_fp32_modules_strict``,
            ``_keys_to_ignore_on_load_unexpected`` and ``_keys_to_ignore_on_load_missing``.
        checkpoint: from ``find_checkpoint``.
        device: where parameters and buffers go.
        dtype: what floating-point tensors become; integers and booleans stay as stored.
        label: the component's name, for messages and progress.
        progress: told bytes done of ``checkpoint.total_bytes``, after each tensor.
        home: takes weights that do not go to the device: into host memory, or over ranks.
        exact: stored names are the module's, one to one; what its class declares is not heard.

    Raises:
        CheckpointError: before any allocation if names or shapes do not match (see match_keys);
            while reading if tied weights are stored twice with different values.
        PipelineDefinitionError: if the constructor left a buffer without values.
    """
    stored_fp8 = sort_stored(checkpoint, label)
    match = _match(module, stored_fp8.weights, label, exact=exact)
    ignored = (*match.ignored, *stored_fp8.aside)
    dtype_for = dtype_rule(module, dtype)
    tracker = _Tracker(checkpoint, (*ignored, *stored_fp8.scales.values()), label, progress)
    counts: Counter[str] = Counter()
    # Made before a home puts its own parameters in their place.
    delivery = _Delivery(module, match, home, device)
    if home is not None:
        home.prepare(module, _weight_specs(module, match, dtype_for))
    sharded = 0
    with TensorReader() as reader:
        for slot in _in_file_order(match, checkpoint):
            stored = checkpoint.tensors[slot.source]
            shard = delivery.shards[slot.names[0]]
            views = _read(reader, slot.source, stored, shard)
            scale = _read_scale(reader, checkpoint, stored_fp8.scales.get(slot.source))
            target = delivery.deliver(slot, views, scale, dtype_for(slot.names[0]))
            counts[f"{stored.dtype} -> {str(target).removeprefix('torch.')}"] += 1
            sharded += shard is not None
            for copy in slot.copies:
                again = _read(reader, copy, checkpoint.tensors[copy], shard)
                _require_equal(slot, copy, views, again, label)
            tracker.advance(slot)
        bytes_read = reader.bytes_read
    _finish(module, device, label)
    if home is not None:
        home.finish()
    return LoadReceipt(
        component=label,
        files=checkpoint.files,
        bytes_read=bytes_read,
        tensors=len(match.slots),
        dtypes=MappingProxyType(dict(counts)),
        ignored=ignored,
        unused=checkpoint.unused,
        sharded=sharded,
    )


def check_weights(
    module: nn.Module, checkpoint: Checkpoint, *, label: str, exact: bool = False
) -> None:
    """Refuse, by the headers alone, what `load_weights` would refuse for its names and shapes.

    Raises:
        CheckpointError: missing, unexpected or misshapen tensors, all in one message.
    """
    _match(module, sort_stored(checkpoint, label).weights, label, exact=exact)


def dtype_rule(module: nn.Module, dtype: torch.dtype) -> DtypeRule:
    """Module name -> the floating dtype it is loaded in: ``dtype``, or float32 on an fp32 island.

    Each library means its declarations its own way, and its checkpoints were made with them:
    Transformers keeps ``_keep_in_fp32_modules`` in float32 for float16 only (a regex anywhere in
    the name; T5's ``wo`` is bfloat16 in bfloat16) and ``_keep_in_fp32_modules_strict`` for both
    half precisions; Diffusers, and our own classes, match whole parts of the dotted name.
    """
    loose = _declared(module, "_keep_in_fp32_modules")
    strict = _declared(module, "_keep_in_fp32_modules_strict")
    if not is_transformers_model(module):
        parts = {*loose, *strict}
        return lambda name: torch.float32 if parts.intersection(name.split(".")) else dtype
    patterns = strict if dtype in (torch.float16, torch.bfloat16) else []
    patterns = [*patterns, *loose] if dtype == torch.float16 else patterns
    islands = [re.compile(pattern.replace("*", ".*")) for pattern in patterns]
    return lambda name: torch.float32 if any(rule.search(name) for rule in islands) else dtype


def _weight_specs(module: nn.Module, match: KeyMatch, dtype_for: DtypeRule) -> list[WeightSpec]:
    """Every parameter that will be filled, as this rank will hold it."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    specs = []
    for slot in match.slots:
        parameter = parameters.get(slot.names[0])
        if parameter is not None and quantizer_of(parameter) is not None:
            specs.append(WeightSpec(slot.names, parameter.shape, parameter.dtype))
            scale = parameters[_scale_name(slot)]
            specs.append(WeightSpec((_scale_name(slot),), scale.shape, scale.dtype))
        elif parameter is not None:
            dtype = dtype_for(slot.names[0]) if parameter.is_floating_point() else parameter.dtype
            specs.append(WeightSpec(slot.names, parameter.shape, dtype))
    return specs


def _match(module: nn.Module, checkpoint: Checkpoint, label: str, *, exact: bool) -> KeyMatch:
    if exact:
        return match_keys(module, checkpoint, label=label, rename=str, ignore_computed=False)
    if is_transformers_model(module):
        rename = transformers_rename(module, label)
        ignored = list(transformers_ignored(module))
    else:
        table = getattr(module, "checkpoint_names", None) or {}
        rename = rename_by_table(table, type(module).__name__)
        ignored = _declared(module, "_keys_to_ignore_on_load_unexpected")
    return match_keys(
        module,
        checkpoint,
        label=label,
        rename=rename,
        ignore_unexpected=ignored,
        ignore_missing=_declared(module, "_keys_to_ignore_on_load_missing"),
    )


def _declared(module: nn.Module, attribute: str) -> list[str]:
    """A declaration of the class, which libraries write as None, one name, a list or a set."""
    value: str | Collection[str] | None = getattr(module, attribute, None)
    return [value] if isinstance(value, str) else sorted(value or ())


def _in_file_order(match: KeyMatch, checkpoint: Checkpoint) -> list[Slot]:
    def place(slot: Slot) -> tuple[Path, int]:
        stored = checkpoint.tensors[slot.source]
        return stored.file, stored.offset

    return sorted(match.slots, key=place)


def _read(
    reader: TensorReader, name: str, stored: StoredTensor, shard: Shard | None
) -> list[torch.Tensor]:
    """Views of a stored tensor: one of all of it, or those of a slice's pieces."""
    return [reader.read(name, stored)] if shard is None else reader.read_pieces(name, stored, shard)


def _placed(
    views: list[torch.Tensor], shard: Shard | None, device: str, dtype: torch.dtype
) -> torch.Tensor:
    """A dense copy of mapped tensors, on the device, in the dtype: never an alias of the file."""
    if len(views) > 1:
        assert shard is not None
        shape = list(views[0].shape)
        shape[shard.dim] = sum(view.shape[shard.dim] for view in views)
        copy = torch.empty(shape, device=device, dtype=dtype)
        parts = copy.split([view.shape[shard.dim] for view in views], shard.dim)
        for part, view in zip(parts, views, strict=True):
            part.copy_(view)
        return copy
    (view,) = views
    if torch.device(device).type == "cpu":
        return view.to(dtype=dtype, copy=True, memory_format=torch.contiguous_format)
    # The stored bytes travel, the device casts.
    return view.contiguous().to(device).to(dtype)


class _Delivery:
    """Hands each slot's values to where they will stay: a home, or the device."""

    def __init__(
        self, module: nn.Module, match: KeyMatch, home: WeightHome | None, device: str
    ) -> None:
        self._module = module
        self._home = home
        self._device = device
        places = {slot.names[0]: _tensor(module, slot.names[0]) for slot in match.slots}
        self.shards = {name: shard_of(place) for name, place in places.items()}
        self._quantizers = {name: quantizer_of(place) for name, place in places.items()}

    def deliver(
        self,
        slot: Slot,
        views: list[torch.Tensor],
        scale: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.dtype:
        """Fill a slot from what was read of it; returns the dtype that it has now.

        Eight bits are quantised, and stored ones widened, on the device that will compute.
        """
        shard, quantizer = self.shards[slot.names[0]], self._quantizers[slot.names[0]]
        stored = views[0].dtype
        if quantizer is not None:
            value = _placed(views, shard, self._device, E4M3 if stored == E4M3 else torch.float32)
            weight, scales = eight_bit(value, scale, quantizer, shard, slot.source)
            del value
            self._hand(slot.names, [weight], None, E4M3)
            self._hand((_scale_name(slot),), [scales], None, torch.float32)
            return E4M3
        if scale is not None:
            value = widened(_placed(views, shard, self._device, E4M3), scale, shard, dtype)
            self._hand(slot.names, [value], None, dtype)
            return dtype
        target = dtype if stored.is_floating_point else stored
        self._hand(slot.names, views, shard, target)
        return target

    def _hand(
        self,
        names: tuple[str, ...],
        views: list[torch.Tensor],
        shard: Shard | None,
        dtype: torch.dtype,
    ) -> None:
        dim = 0 if shard is None else shard.dim
        if self._home is None or not self._home.take(names, views, dim, dtype):
            _assign(self._module, names, _placed(views, shard, self._device, dtype))


def _scale_name(slot: Slot) -> str:
    return slot.names[0] + "_scale"


def _read_scale(
    reader: TensorReader, checkpoint: Checkpoint, name: str | None
) -> torch.Tensor | None:
    if name is None:
        return None
    return reader.read(name, checkpoint.tensors[name]).float().clone()


def _tensor(module: nn.Module, name: str) -> torch.Tensor:
    """The parameter or buffer of a name."""
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), leaf)


def _assign(module: nn.Module, names: tuple[str, ...], value: torch.Tensor) -> None:
    """Put one tensor under all its names, as a frozen parameter where a parameter was."""
    old = _tensor(module, names[0])
    if isinstance(old, nn.Parameter):
        value = nn.Parameter(value, requires_grad=False)
        vars(value).update(vars(old))
    for name in names:
        path, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(path), leaf, value)


def _require_equal(
    slot: Slot, copy: str, first: list[torch.Tensor], second: list[torch.Tensor], label: str
) -> None:
    pairs = zip(first, second, strict=True)
    if not all(_same_bytes(a, b) or torch.equal(a.double(), b.double()) for a, b in pairs):
        raise CheckpointError(
            f"Checkpoint of {label!r} stores {slot.source!r} and {copy!r} with different values, "
            f"but the model shares one tensor between {listed(slot.names)}."
        )


def _same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """The usual case, without the memory that a comparison in a wider dtype takes."""
    if first.dtype != second.dtype:
        return False
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


def _finish(module: nn.Module, device: str, label: str) -> None:
    """Eval mode, no gradients, computed buffers on the device, nothing left without values."""
    for owner in module.modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            if not buffer.is_meta:
                setattr(owner, name, buffer.to(device))
    state = [*module.named_parameters(), *module.named_buffers()]
    empty = [name for name, tensor in state if tensor.is_meta]
    if empty:
        raise PipelineDefinitionError(
            f"{type(module).__name__} ({label!r}) has no values for {listed(empty)} after loading: "
            "its constructor computes them from parameters, which have none yet. Compute them in "
            "forward, or make them persistent buffers."
        )
    module.eval().requires_grad_(False)


class _Tracker:
    """Tells a listener how many of the checkpoint's bytes are done; what is ``beside`` the slots
    (ignored tensors, scales) counts at once."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        beside: Collection[str],
        label: str,
        listener: ProgressListener | None,
    ) -> None:
        self._tensors = checkpoint.tensors
        self._label = label
        self._listener = listener
        self._total = checkpoint.total_bytes
        self._done = sum(self._tensors[name].nbytes for name in beside)
        self._tell()

    def advance(self, slot: Slot) -> None:
        self._done += sum(self._tensors[name].nbytes for name in (slot.source, *slot.copies))
        self._tell()

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener(ProgressEvent("load", self._done, self._total, self._label))
