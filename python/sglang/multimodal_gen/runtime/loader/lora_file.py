"""Adapter files: where they are, what their headers say, their tensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from sglang.multimodal_gen.runtime.layers.lora.adapter_keys import other_adapter_type
from sglang.multimodal_gen.runtime.layers.lora.normal_form import (
    AdapterConfig,
    AlphaSource,
    alpha_pattern_of,
)
from sglang.multimodal_gen.runtime.loader.checkpoint import PICKLE_SUFFIXES, SUFFIX, listed
from sglang.multimodal_gen.runtime.loader.hub import fetch_adapter_from_hub, files_on_hub
from sglang.multimodal_gen.runtime.loader.json_file import read_json_object
from sglang.multimodal_gen.runtime.loader.safetensors_header import StoredTensor, read_header
from sglang.multimodal_gen.runtime.loader.tensor_reader import TensorReader
from sglang.multimodal_gen.runtime.utils.component_roles import DENOISER
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

PEFT_FILE = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"
USUAL_NAMES = (PEFT_FILE, "pytorch_lora_weights.safetensors")
_HUB_ADAPTER = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(:(?P<file>[\w. /()+-]+))?"
)
DIFFUSERS_METADATA = "lora_adapter_metadata"


@dataclass(frozen=True, slots=True)
class LoRAFile:
    """An adapter file that was found and whose header was read; no tensor is read yet.

    ``configs`` say how to scale, by component, the empty name for all. ``stamp`` changes when the
    file does.
    """

    path: Path
    tensors: Mapping[str, StoredTensor]
    configs: Mapping[str, AdapterConfig]
    stamp: tuple[int, int]

    def read(self) -> dict[str, torch.Tensor]:
        """All tensors, on the CPU, as stored; independent of the file afterwards."""
        with TensorReader() as reader:
            return {
                name: reader.read(name, stored).clone() for name, stored in self.tensors.items()
            }


def find_lora_file(lora_path: str, weight_name: str | None = None) -> LoRAFile:
    """The adapter in a safetensors file, in a folder that holds one, or on the hub.

    What is no path here and has the form ``org/name`` or ``org/name:file.safetensors`` is a hub id;
    one file of it is fetched where the cache lacks it.

    Raises:
        ModelNotFound: a hub id, and the hub or the cache has no such thing.
        CheckpointError: nothing is there, it is no safetensors file or a damaged one, or it is
            another kind of adapter than LoRA (its name is in the message).
    """
    path = _as_path(lora_path)
    hub_id = None if path.exists() else _HUB_ADAPTER.fullmatch(lora_path)
    if hub_id is not None:
        path = _from_hub(hub_id["repo"], weight_name or hub_id["file"])
    path = _chosen_file(path, None if path.is_file() else weight_name)
    tensors = read_header(path)
    kind = other_adapter_type(tensors)
    if kind is not None:
        raise CheckpointError(f"{path} is a {kind} adapter. Only LoRA is supported.")
    stat = path.stat()
    return LoRAFile(path, tensors, _configs(path), (stat.st_size, stat.st_mtime_ns))


def _as_path(text: str) -> Path:
    try:
        path = Path(text).expanduser()
        path.exists()  # the system may refuse to look: a name that is too long, no permission
    except (OSError, RuntimeError, ValueError) as problem:
        shown = str(text) if len(str(text)) <= 120 else f"{str(text)[:117]}..."
        reason = problem.strerror if isinstance(problem, OSError) else problem
        said = str(reason).rstrip(".")
        raise CheckpointError(f"lora_path={shown!r} is no usable path: {said}.") from problem
    return path


def _chosen_file(path: Path, weight_name: str | None) -> Path:
    if path.is_dir():
        path = path / (_only_file(path) if weight_name is None else weight_name)
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist. Give an adapter's {SUFFIX} file, the folder that holds it, or "
            f"a hub id: org/name, or org/name:FILE{SUFFIX}."
        )
    if path.name.endswith(PICKLE_SUFFIXES):
        raise CheckpointError(
            f"{path} is a pickle, which is refused: loading one can run code of whoever made it. "
            f"Use the publisher's {SUFFIX} file."
        )
    return path


def _from_hub(repo_id: str, file_name: str | None) -> Path:
    """The one file of a repository that is meant, fetched; never all that it holds.

    Without a name: one of the usual names, or the only safetensors file at the top.
    """
    if file_name is not None:
        wanted = [file_name] + [PEFT_CONFIG] * (file_name == PEFT_FILE)
        path = fetch_adapter_from_hub(repo_id, wanted) / file_name
        if path.is_file():
            return path
        found = _adapters(files_on_hub(repo_id, path.parents[file_name.count("/")]))
        raise CheckpointError(
            f"lora_path={repo_id!r} has no file {file_name!r}.{did_you_mean(file_name, found)} "
            f"It has: {listed(found) or 'no ' + SUFFIX + ' file'}."
        )
    folder = fetch_adapter_from_hub(repo_id, [*USUAL_NAMES, PEFT_CONFIG])
    if any((folder / name).is_file() for name in USUAL_NAMES):
        return folder / _only_file(folder)
    found = [name for name in _adapters(files_on_hub(repo_id, folder)) if "/" not in name]
    if len(found) != 1:
        raise CheckpointError(
            f"lora_path={repo_id!r} holds {len(found)} {SUFFIX} files"
            + (f": {listed(found)}. Give the one you mean: {repo_id}:{found[0]}." if found else ".")
        )
    return fetch_adapter_from_hub(repo_id, found) / found[0]


def _adapters(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.endswith(SUFFIX)]


def _only_file(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    for usual in USUAL_NAMES:
        if usual in names:
            return usual
    found = [name for name in names if name.endswith(SUFFIX)]
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(
            f"{folder} holds {len(found)} {SUFFIX} files: {listed(found)}. Give the one you mean."
        )
    raise CheckpointError(f"{folder} holds no {SUFFIX} file: it has {listed(names) or 'nothing'}.")


def _configs(path: Path) -> dict[str, AdapterConfig]:
    """Scaling by component, from the file's metadata or the configuration beside it."""
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata() or {}
    if DIFFUSERS_METADATA in metadata:
        return _diffusers_configs(path, metadata[DIFFUSERS_METADATA])
    config = path.with_name(PEFT_CONFIG)
    alone = path.name == PEFT_FILE or len(list(path.parent.glob(f"*{SUFFIX}"))) == 1
    if alone and config.is_file():
        return {"": _config(config, read_json_object(config), "adapter_config.json")}
    return {}


def _diffusers_configs(path: Path, text: str) -> dict[str, AdapterConfig]:
    """Diffusers writes one flat object, each key with its component in front."""
    try:
        flat = json.loads(text)
    except ValueError as problem:
        raise CheckpointError(
            f"{path}: its {DIFFUSERS_METADATA} is not JSON ({problem})."
        ) from problem
    if not isinstance(flat, dict):
        raise CheckpointError(f"{path}: its {DIFFUSERS_METADATA} is no JSON object.")
    grouped: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        component, _, name = key.partition(".")
        component = DENOISER if component == "unet" else component
        grouped.setdefault(component, {})[name] = value
    return {
        component: _config(path, values, "file metadata", prefix=f"{component}." * bool(component))
        for component, values in grouped.items()
    }


def _config(
    path: Path, values: Mapping[str, Any], source: AlphaSource, prefix: str = ""
) -> AdapterConfig:
    """``prefix`` is what stands before the keys in the file."""
    kind = values.get("peft_type") or "LORA"
    if not isinstance(kind, str) or kind.upper() != "LORA":
        raise CheckpointError(f"{path} is a {kind} adapter. Only LoRA is supported.")
    switches = {name: values.get(name) for name in ("use_dora", "use_rslora")}
    for name, value in switches.items():
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{path}: {prefix}{name}={value!r} must be true or false.")
    if switches["use_dora"]:
        raise CheckpointError(f"{path} is a DoRA adapter. Only LoRA is supported.")
    pattern = values.get("alpha_pattern") or {}
    if not isinstance(pattern, dict):
        raise CheckpointError(f"{path}: {prefix}alpha_pattern={pattern!r} must be an object.")
    for expression in pattern:
        try:
            alpha_pattern_of(expression)
        except (re.error, OverflowError, RecursionError) as problem:
            raise CheckpointError(
                f"{path}: {prefix}alpha_pattern has {expression!r}, which is no regular expression "
                f"({problem})."
            ) from problem
    return AdapterConfig(
        source=source,
        alpha=_number(path, f"{prefix}lora_alpha", values.get("lora_alpha")),
        alpha_pattern={
            key: _number(path, f"{prefix}alpha_pattern[{key!r}]", value)
            for key, value in pattern.items()
        },
        rank_stabilized=bool(switches["use_rslora"]),
    )


def _number(path: Path, key: str, value: Any) -> float:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        number = float(value) if fits else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
        raise CheckpointError(f"{path}: {key}={shown} must be a finite number.")
    return number
