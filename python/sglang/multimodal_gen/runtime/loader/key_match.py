"""Stored names matched to a module's parameters and buffers: strictly, before any is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from sglang.multimodal_gen.runtime.layers.quantization.fp8 import is_scale
from sglang.multimodal_gen.runtime.layers.shard import shard_of
from sglang.multimodal_gen.runtime.loader.checkpoint import Checkpoint, listed
from sglang.multimodal_gen.runtime.loader.safetensors_header import StoredTensor
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, PipelineDefinitionError

Rename = Callable[[str], str]

_FLOATS = frozenset({"F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"})
_INTEGERS = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})


@dataclass(frozen=True, slots=True)
class Slot:
    """One place in a module that one stored tensor fills.

    ``names`` are all the names of the place (several when weights are tied); ``source`` is the
    stored name that fills it, ``copies`` are further stored names that must hold the same values.
    """

    names: tuple[str, ...]
    source: str
    copies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KeyMatch:
    """How a checkpoint fills a module: every slot, and the stored names left out on purpose."""

    slots: tuple[Slot, ...]
    ignored: tuple[str, ...]


def match_keys(
    module: nn.Module,
    checkpoint: Checkpoint,
    *,
    label: str,
    rename: Rename,
    ignore_unexpected: Iterable[str] = (),
    ignore_missing: Iterable[str] = (),
    ignore_computed: bool = True,
) -> KeyMatch:
    """The match of a module's state and a checkpoint's tensors, or an error that lists all faults.

    Args:
        module: built on meta, or anywhere; nothing in it is changed.
        checkpoint: what is stored.
        label: the component's name, for messages.
        rename: stored name -> module name.
        ignore_unexpected: patterns (``re.search``) of module names that may be stored in vain.
        ignore_missing: patterns of persistent *buffers* that may be absent: the constructor's
            values stay. A parameter is never excused: it would have no values at all.
        ignore_computed: buffers that the constructor computes and does not save may be stored in
            vain.

    Raises:
        CheckpointError: for missing, unexpected or misshapen tensors, all in one message.
    """
    state = _state(module)
    stored_for = _stored_names(checkpoint, rename, label)
    extra = [name for name in stored_for if name not in state]
    ignored = {
        name
        for name in extra
        if _matches(name, ignore_unexpected) or (ignore_computed and _is_computed(name, module))
    }
    slots: list[Slot] = []
    missing: list[str] = []
    for names in _tie_groups(state):
        sources = [stored_for[name] for name in names if name in stored_for]
        if sources:
            slots.append(Slot(names, sources[0], tuple(sources[1:])))
        elif isinstance(state[names[0]], nn.Parameter) or not _matches(names[0], ignore_missing):
            missing.append(names[0])
    unexpected = [stored_for[name] for name in extra if name not in ignored]
    misshapen = [
        fault
        for slot in slots
        for source in (slot.source, *slot.copies)
        if (fault := _misfit(slot.names[0], state[slot.names[0]], checkpoint.tensors[source]))
    ]
    if missing or unexpected or misshapen:
        faults = {"Missing": missing, "Unexpected": unexpected, "Misshapen": misshapen}
        raise CheckpointError(_mismatch(module, checkpoint, label, faults))
    return KeyMatch(tuple(slots), tuple(stored_for[name] for name in extra))


def rename_by_table(table: Mapping[str, str], owner: str) -> Rename:
    """Renaming by a ``checkpoint_names`` table: each pattern is replaced in turn, in table order.

    Raises:
        PipelineDefinitionError: if a pattern is not a regular expression.
    """
    try:
        rules = [(re.compile(pattern), replacement) for pattern, replacement in table.items()]
    except re.error as problem:
        raise PipelineDefinitionError(
            f"{owner}.checkpoint_names holds {problem.pattern!r}, which is not a regular "
            f"expression: {problem}."
        ) from problem

    def rename(name: str) -> str:
        for pattern, replacement in rules:
            name = pattern.sub(replacement, name)
        return name

    return rename


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; tied ones appear under each of their names. Scales
    come with the weights that they belong to, stored or made."""
    state = module.state_dict(keep_vars=True)
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and not is_scale(value)
    }


def _stored_names(checkpoint: Checkpoint, rename: Rename, label: str) -> dict[str, str]:
    """Module name -> stored name."""
    stored_for: dict[str, str] = {}
    for stored in sorted(checkpoint.tensors, key=_natural):
        name = rename(stored)
        if name in stored_for:
            raise CheckpointError(
                f"Checkpoint of {label!r} in {checkpoint.path} stores {stored_for[name]!r} and "
                f"{stored!r}, which both mean {name!r}."
            )
        stored_for[name] = stored
    return stored_for


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key with layer numbers in numeric order: some renames depend on what came before."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


def _tie_groups(state: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    groups: dict[int, list[str]] = {}
    for name, value in state.items():
        groups.setdefault(id(value), []).append(name)
    return [tuple(names) for names in groups.values()]


def _is_computed(name: str, module: nn.Module) -> bool:
    # A buffer that the constructor computes and does not save: older files still carry it.
    path, _, leaf = name.rpartition(".")
    try:
        return leaf in module.get_submodule(path)._buffers
    except AttributeError:
        return False


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _misfit(name: str, target: torch.Tensor, stored: StoredTensor) -> str:
    """Why a stored tensor cannot fill its slot; empty when it can. Slices are measured whole."""
    shard = shard_of(target)
    shape = tuple(target.shape) if shard is None else shard.whole_shape(target.shape)
    if shape != stored.shape:
        return f"{name} (stored {_shape(stored.shape)}, the model has {_shape(shape)})"
    kind = _FLOATS if target.is_floating_point() else _INTEGERS
    if stored.dtype in kind or (target.is_complex() and stored.dtype == "C64"):
        return ""
    return f"{name} (stored as {stored.dtype}, the model has {str(target.dtype)[6:]})"


def _shape(shape: Collection[int]) -> str:
    return "x".join(str(size) for size in shape) or "scalar"


def _mismatch(
    module: nn.Module, checkpoint: Checkpoint, label: str, faults: Mapping[str, list[str]]
) -> str:
    parts = [
        f"{title} ({len(names)}): [{listed(names)}]." for title, names in faults.items() if names
    ]
    unexpected = faults["Unexpected"]
    if any("lora" in name.lower() for name in unexpected):
        parts.append("The names look like those of a LoRA, not of a whole component.")
    elif any(name.endswith(("_scale", ".scales", ".qweight", ".absmax")) for name in unexpected):
        parts.append(
            "The names look like those of a quantised checkpoint, of a kind that is not read here: "
            "of fp8 (F8_E4M3) each weight_scale stands beside its weight."
        )
    else:
        parts.append("Check that config.json and the weights belong together.")
    return (
        f"Checkpoint weights do not match {label!r} ({type(module).__name__}) in "
        f"{checkpoint.path}. {' '.join(parts)}"
    )
