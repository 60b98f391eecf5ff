"""Weights from safetensors into modules: built on meta, checked, then streamed into place."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.loader.checkpoint import Checkpoint, listed
from sglang.multimodal_gen.runtime.loader.safetensors_header import StoredTensor
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError
from sglang.multimodal_gen.runtime.utils.progress import ProgressEvent, ProgressListener

PARAMETER_HOOK = torch.nn.modules.module.register_module_parameter_registration_hook


@dataclass(slots=True)
class LoadReceipt:
    """What loading one component did: bytes read, tensors placed, dtypes stored -> in use."""

    bytes_read: int = 0
    tensors: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)

    def count(self, stored: StoredTensor, placed: Tensor) -> None:
        """Add one placed tensor."""
        self.bytes_read += stored.nbytes
        self.tensors += 1
        change = f"{stored.dtype} -> {str(placed.dtype).removeprefix('torch.')}"
        self.dtypes[change] = self.dtypes.get(change, 0) + 1


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """While this is open, new modules get parameters without storage and buffers with it.

    Buffers stay real because those that no checkpoint holds (position tables) are computed in the
    constructor. Uses torch's own registration hook.
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    handle = PARAMETER_HOOK(to_meta)
    try:
        yield
    finally:
        handle.remove()


def load_weights(
    module: nn.Module,
    checkpoint: Checkpoint,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    component: str,
    progress: ProgressListener | None = None,
) -> LoadReceipt:
    """Fill a module that was built under `parameters_on_meta`.

    Every key and shape is checked before the first tensor is read. Tensors go from the mapped file
    straight to their device and dtype, one at a time; integers keep theirs, and so do the parts
    that the class declares as float32 islands.

    Raises:
        CheckpointError: keys are missing or unexpected, or shapes differ; lists them.
    """
    slots = _slots(module)
    sources = _match(module, slots, checkpoint, component)
    _check_shapes(slots, sources, checkpoint, component)
    is_island = _islands(module, dtype)
    receipt, done, total = LoadReceipt(), 0, checkpoint.total_bytes
    for path in checkpoint.files:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name, key in sources.items():
                stored = checkpoint.tensors[key]
                if stored.file != path:
                    continue
                tensor = file.get_tensor(key)
                target = torch.float32 if is_island(name) else dtype
                placed = _placed(tensor, device, target)
                slots[name].fill(placed)
                receipt.count(stored, placed)
                done += stored.nbytes
                if progress is not None:
                    progress(ProgressEvent("load", done, total, component))
    _finish(module, device, dtype, component)
    return receipt


@dataclass(slots=True)
class _Slot:
    """One parameter or buffer, under all names that share it."""

    shape: tuple[int, ...]
    places: list[tuple[nn.Module, str]]
    names: list[str]
    is_parameter: bool

    def fill(self, tensor: Tensor) -> None:
        value = nn.Parameter(tensor, requires_grad=False) if self.is_parameter else tensor
        for module, name in self.places:
            (module._parameters if self.is_parameter else module._buffers)[name] = value  # pyright: ignore[reportArgumentType]


def _slots(module: nn.Module) -> dict[str, _Slot]:
    """What a checkpoint has to fill, by name; tied parameters share one slot."""
    by_identity: dict[int, _Slot] = {}
    slots: dict[str, _Slot] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        persistent = {
            name: buffer
            for name, buffer in owner._buffers.items()
            if buffer is not None and name not in owner._non_persistent_buffers_set
        }
        parameters = {n: p for n, p in owner._parameters.items() if p is not None}
        for group, is_parameter in ((parameters, True), (persistent, False)):
            for name, tensor in group.items():
                slot = by_identity.setdefault(
                    id(tensor), _Slot(tuple(tensor.shape), [], [], is_parameter)
                )
                slot.places.append((owner, name))
                slot.names.append(dot + name)
                slots[dot + name] = slot
    return slots


def _match(
    module: nn.Module, slots: Mapping[str, _Slot], checkpoint: Checkpoint, component: str
) -> dict[str, str]:
    """Slot name -> the stored key that fills it; one entry for tied names."""
    rename = _renamer(module, set(slots))
    ignored = [re.compile(p) for p in getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()]
    sources: dict[str, str] = {}
    unexpected = []
    for key in checkpoint.tensors:
        name = rename(key)
        if name in slots:
            sources[name] = key
        elif not any(pattern.search(key) for pattern in ignored):
            unexpected.append(key)
    filled = {id(slots[name]) for name in sources}
    missing = sorted({s.names[0] for s in slots.values() if id(s) not in filled})
    if missing or unexpected:
        raise CheckpointError(_mismatch(module, checkpoint, component, missing, unexpected))
    first: dict[int, str] = {}
    for name in sources:
        first.setdefault(id(slots[name]), name)
    return {name: sources[name] for name in first.values()}


def _mismatch(
    module: nn.Module,
    checkpoint: Checkpoint,
    component: str,
    missing: list[str],
    unexpected: list[str],
) -> str:
    parts = [f"{checkpoint.path}: the weights do not fit {component} ({type(module).__name__})."]
    if missing:
        parts.append(f"Missing {len(missing)}: {listed(missing)}.")
    if unexpected:
        parts.append(f"Unexpected {len(unexpected)}: {listed(sorted(unexpected))}.")
    parts.append("Check that config.json and the weights belong together.")
    return " ".join(parts)


def _check_shapes(
    slots: Mapping[str, _Slot], sources: Mapping[str, str], checkpoint: Checkpoint, component: str
) -> None:
    wrong = [
        f"{name}: stored {list(checkpoint.tensors[key].shape)}, needed {list(slots[name].shape)}"
        for name, key in sources.items()
        if tuple(checkpoint.tensors[key].shape) != slots[name].shape
    ]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.path}: {len(wrong)} tensors of {component} have another shape than "
            f"config.json says. {listed(wrong)}"
        )


def _renamer(module: nn.Module, names: set[str]) -> Callable[[str], str]:
    """How stored keys become the module's names.

    A class may carry ``checkpoint_names``, a table of patterns and replacements. Transformers'
    classes follow that library's own table of renames since older releases.
    """
    table = getattr(module, "checkpoint_names", None)
    if table:
        patterns = [(re.compile(pattern), target) for pattern, target in dict(table).items()]

        def by_table(key: str) -> str:
            for pattern, target in patterns:
                key, hits = pattern.subn(target, key)
                if hits:
                    break
            return key

        return by_table
    if type(module).__module__.startswith("transformers."):
        return _transformers_renamer(module, names)
    return lambda key: key


def _transformers_renamer(module: Any, names: set[str]) -> Callable[[str], str]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    # Only one-to-one renames; a conversion that merges tensors leaves its keys unexpected.
    renames = [r for r in get_model_conversion_mapping(module) if isinstance(r, WeightRenaming)]

    def rename(key: str) -> str:
        if key in names:
            return key
        for transform in renames:
            key = transform.rename_source_key(key)[0]
        return key

    return rename


def _islands(module: nn.Module, dtype: torch.dtype) -> Callable[[str], bool]:
    """Which parameters stay float32 whatever is asked: the class says so by name.

    Transformers' classes mean ``_keep_in_fp32_modules`` for float16 alone.
    """
    if dtype == torch.float32:
        return lambda name: True
    patterns = list(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    of_transformers = type(module).__module__.startswith("transformers.")
    if dtype == torch.float16 or not of_transformers:
        patterns += list(getattr(module, "_keep_in_fp32_modules", None) or ())
    if not patterns:
        return lambda name: False
    found = re.compile("|".join(rf"(^|\.){re.escape(p)}($|\.)" for p in patterns))
    return lambda name: bool(found.search(name))


def _placed(tensor: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    target = dtype if tensor.is_floating_point() else tensor.dtype
    placed = tensor.to(device=device, dtype=target)
    # The mapped file must not stay behind a weight: it may change or vanish under us.
    return placed.clone() if placed is tensor else placed


def _finish(
    module: nn.Module, device: torch.device | str, dtype: torch.dtype, component: str
) -> None:
    """Buffers that no checkpoint holds move to the device; nothing may be left without storage."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)
    left = [name for name, p in module.named_parameters() if p.is_meta]
    left += [name for name, b in module.named_buffers() if b.is_meta]
    assert not left, f"{component}: no value for {listed(left)}"
    module.eval().requires_grad_(False)
