"""Weights that a checkpoint stores in eight bits with scales beside them: how it names them.

============================  ===============================================================
``X.weight`` in F8_E4M3 and   written by
============================  ===============================================================
``X.weight_scale``            compressed-tensors, ModelOpt, Diffusers and vLLM users, ComfyUI
``X.scale_weight``            ComfyUI's "scaled fp8" files, with a tensor ``scaled_fp8``
============================  ===============================================================

One number, or one for each row ([O] or [O, 1]); ``weight = stored * scale``. Scales of inputs
(``input_scale``, ``scale_input``) serve static schemes; here inputs are scaled as they come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from sglang.multimodal_gen.runtime.loader.checkpoint import Checkpoint
from sglang.multimodal_gen.runtime.loader.safetensors_header import StoredTensor
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

STORED_TYPE = "F8_E4M3"
_SCALES = (".weight_scale", ".scale_weight")
_ASIDE = (".input_scale", ".scale_input", ".output_scale", "scaled_fp8")
_OTHERS = (
    (".weight_scale_inv", "fp8 in blocks (weight_scale_inv)"),
    (".weight_scale_2", "NVFP4 (weight_scale_2)"),
    (".qweight", "GPTQ or AWQ (qweight)"),
    (".absmax", "bitsandbytes (absmax)"),
    (".weight_packed", "packed integers of compressed-tensors (weight_packed)"),
    (".comfy_quant", "ComfyUI's mixed formats (comfy_quant)"),
    (".smooth_factor", "SVDQuant (smooth_factor)"),
)
READABLE = "fp8 (F8_E4M3) weights with weight_scale or scale_weight, one number or one for each row"


@dataclass(frozen=True, slots=True)
class StoredFp8:
    """A checkpoint, sorted: ``weights`` without their scales; ``scales`` by the weight's stored
    name; ``aside``, names of what is not needed here."""

    weights: Checkpoint
    scales: Mapping[str, str]
    aside: tuple[str, ...]


def sort_stored(checkpoint: Checkpoint, label: str) -> StoredFp8:
    """Which weights are stored with scales. One without any is returned as it is.

    Raises:
        CheckpointError: they are quantised otherwise than this runtime reads, by the method's name.
    """
    tensors = checkpoint.tensors
    _refuse_others(checkpoint, label)
    scales: dict[str, str] = {}
    for name in tensors:
        ending = next((end for end in _SCALES if name.endswith(end)), None)
        weight = "" if ending is None else name.removesuffix(ending) + ".weight"
        if weight in tensors:
            _check(tensors[weight], tensors[name], weight, name, f"{label!r} in {checkpoint.path}")
            scales[weight] = name
    taken = set(scales.values())
    aside = tuple(n for n in tensors if _is_aside(n, scales))
    left = {n: t for n, t in tensors.items() if n not in taken and n not in aside}
    if len(left) == len(tensors):
        return StoredFp8(checkpoint, {}, ())
    return StoredFp8(replace(checkpoint, tensors=MappingProxyType(left)), scales, aside)


def refuse_unreadable(config: Mapping[str, Any], label: str, where: object) -> None:
    """Refuse what a component's ``config.json`` says of its quantisation, unless its names may say
    that it can be read.

    Raises:
        CheckpointError: names the method.
    """
    said = config.get("quantization_config")
    if not said:
        return
    said = said if isinstance(said, Mapping) else {"quant_method": said}
    method = str(said.get("quant_method", "unnamed")).lower()
    kind = str(said.get("format") or said.get("quant_algo") or "").lower()
    plain = {
        "fp8": not said.get("weight_block_size"),
        "compressed-tensors": kind in ("float-quantized", "naive-quantized"),
        "modelopt": kind == "fp8",
    }
    if not plain.get(method, False):
        detail = f" ({kind})" if kind else ""
        raise CheckpointError(
            f"component {label!r}: {where} is quantised with {method}{detail}, which is not "
            f"supported; use the unquantised checkpoint with --quantization fp8, or {READABLE}"
        )


def _is_aside(name: str, scales: Mapping[str, str]) -> bool:
    """Scales of inputs beside a weight with a scale, and ComfyUI's mark."""
    if name == "scaled_fp8" or name.endswith(".scaled_fp8"):
        return True
    ending = next((end for end in _ASIDE if name.endswith(end)), None)
    return ending is not None and name.removesuffix(ending) + ".weight" in scales


def _refuse_others(checkpoint: Checkpoint, label: str) -> None:
    for name in checkpoint.tensors:
        for ending, method in _OTHERS:
            if name.endswith(ending):
                raise CheckpointError(
                    f"Checkpoint of {label!r} in {checkpoint.path} is quantised with {method}: "
                    f"{name!r}. That is not supported. Read are {READABLE}; or use the unquantised "
                    "checkpoint with --quantization fp8."
                )


def _check(
    weight: StoredTensor, scale: StoredTensor, weight_name: str, scale_name: str, where: str
) -> None:
    if weight.dtype != STORED_TYPE:
        raise CheckpointError(
            f"Checkpoint of {where} stores {weight_name!r} as {weight.dtype} with scales "
            f"({scale_name!r}); read are {READABLE}."
        )
    rows = weight.shape[:1]
    if scale.shape not in ((), (1,), (1, 1), rows, (*rows, 1)):
        raise CheckpointError(
            f"Checkpoint of {where} has {scale_name!r} of shape {list(scale.shape)} for a weight "
            f"of shape {list(weight.shape)}; read are {READABLE}."
        )
