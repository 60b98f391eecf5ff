"""Which weights of a component are held in eight bits: by wish, or because they are stored so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from sglang.multimodal_gen.runtime.layers.quantization.fp8 import WIDTH_MULTIPLE, Fp8Method
from sglang.multimodal_gen.runtime.layers.quantization.install import (
    is_ignored,
    method_of,
    quantize_linears,
)
from sglang.multimodal_gen.runtime.loader.key_match import rename_by_table
from sglang.multimodal_gen.runtime.loader.safetensors_header import StoredTensor
from sglang.multimodal_gen.runtime.loader.stored_fp8 import StoredFp8
from sglang.multimodal_gen.runtime.loader.weights import dtype_rule
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

METHODS: Mapping[str, Fp8Method] = {"fp8": Fp8Method("row"), "fp8-tensor": Fp8Method("tensor")}
"""``--quantization`` -> the method."""
_WEIGHT = ".weight"
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class QuantizationWish:
    """What was asked for a denoiser: by which name, and what stays as it is.

    ``ignored`` are the patterns of the pipeline config, ``asked`` the user's own.
    """

    name: str
    ignored: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()

    @property
    def method(self) -> Fp8Method:
        """The method of that name."""
        return METHODS[self.name]

    @property
    def patterns(self) -> tuple[str, ...]:
        """All linears that stay as they are."""
        return (*self.ignored, *self.asked)


def wish_of(server_args: ServerArgs) -> QuantizationWish | None:
    """What the arguments say, with the list of the model's pipeline config."""
    model, config = server_args.model, server_args.pipeline_config
    if model.quantization is None:
        return None
    ignored = () if config is None else tuple(config.quantization_ignored_layers)
    return QuantizationWish(model.quantization, ignored, model.quantization_ignored_layers)


def quantize_module(
    module: nn.Module, wish: QuantizationWish | None, scales: Mapping[str, str]
) -> tuple[str, ...]:
    """Make places for eight-bit weights in a denoiser that was built on meta; returns their paths.

    ``scales`` are those that its checkpoint stores, by the names of their weights.

    Without a wish they are those that the checkpoint stores so, and inputs are scaled by row. With
    one they are also all others that its patterns leave; ``asked`` patterns hold for stored ones
    too, which are then widened as they load.

    Raises:
        InvalidArgument: a pattern that was asked for matches no linear.
    """
    kept_stored = {path for path in _stored_paths(type(module), scales) if path}
    if wish is None:
        return quantize_linears(module, Fp8Method("row"), only=kept_stored)
    linears = [path for path, m in module.named_modules() if isinstance(m, nn.Linear)]
    for pattern in wish.asked:
        if not any(fnmatchcase(path, pattern) for path in linears):
            problem = f"{pattern!r} matches no linear of {type(module).__name__}"
            raise InvalidArgument("quantization_ignored_layers", list(wish.asked), problem)
    chosen = {
        path
        for path in linears
        if _is_chosen(path, wish, kept_stored) and not _is_island(type(module), path)
    }
    return quantize_linears(module, wish.method, only=chosen)


def loaded_bytes(
    cls: type, names: Mapping[str, StoredTensor], wish: QuantizationWish | None, stored: StoredFp8
) -> dict[str, int]:
    """Module name of each eight-bit weight -> its bytes and its scales', said from headers.

    ``names`` are the stored tensors by their module names. A matrix is taken for a linear's weight:
    embedding tables, which stay as they are, are few in denoisers.
    """
    kept_stored = _stored_paths(cls, stored.scales)
    sizes = {}
    for name, tensor in names.items():
        path, fits = name.removesuffix(_WEIGHT), len(tensor.shape) == 2
        if not name.endswith(_WEIGHT) or not fits or any(w % WIDTH_MULTIPLE for w in tensor.shape):
            continue
        if wish is None:
            held = path in kept_stored
        else:
            held = _is_chosen(path, wish, kept_stored) and not _is_island(cls, path)
        if held:
            scales = (wish.method if wish else METHODS["fp8"]).scales(tensor.shape[0])
            sizes[name] = torch.Size(tensor.shape).numel() + _SCALE_BYTES * scales
    return sizes


def check_given(given: Mapping[str, Any], denoisers: list[str], server_args: ServerArgs) -> None:
    """Refuse the flag for denoisers that were handed in ready, and are not quantised.

    Raises:
        InvalidArgument: names the component.
    """
    wish = server_args.model.quantization
    for name in denoisers:
        module = given.get(name)
        if wish and isinstance(module, nn.Module) and not count_quantized(module):
            problem = f"{name} was handed in ready: only one that is loaded can be quantised"
            raise InvalidArgument("quantization", wish, problem)


def count_quantized(module: nn.Module) -> int:
    """How many linears of a module hold eight bits."""
    return sum(method_of(child) is not None for child in module.modules())


def quantization_note(modules: Mapping[str, Any], device: str) -> str | None:
    """One sentence about what is held in eight bits; None where nothing is."""
    told = []
    for name, module in modules.items():
        if isinstance(module, nn.Module) and (count := count_quantized(module)):
            linears = sum(isinstance(child, nn.Linear) for child in module.modules())
            told.append(f"{count} of {linears} linears of {name}")
    if not told:
        return None
    slow = "; slow on a CPU, which widens them before each product" if device == "cpu" else ""
    return f"quantization: {', '.join(told)} are held in eight bits (e4m3){slow}"


def _is_chosen(path: str, wish: QuantizationWish, kept_stored: set[str]) -> bool:
    if is_ignored(path, wish.asked):
        return False
    return path in kept_stored or not is_ignored(path, wish.ignored)


def _is_island(cls: type, path: str) -> bool:
    """Whether a class keeps a linear in float32."""
    rule = dtype_rule(cls, torch.bfloat16)  # type: ignore[arg-type]
    return rule(path + _WEIGHT) is torch.float32


def _stored_paths(cls: type, scales: Mapping[str, str]) -> set[str]:
    """The modules whose weights are stored in eight bits with scales."""
    rename = rename_by_table(getattr(cls, "checkpoint_names", None) or {}, cls.__name__)
    return {rename(name).removesuffix(_WEIGHT) for name in scales}
