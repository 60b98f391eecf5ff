"""From what a user calls a model to a folder with a ``model_index.json``, or what stands for it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from sglang.multimodal_gen.runtime.loader.checkpoint import PICKLE_SUFFIXES, SUFFIX
from sglang.multimodal_gen.runtime.loader.hub import fetch_from_hub
from sglang.multimodal_gen.runtime.loader.json_file import read_json_object
from sglang.multimodal_gen.runtime.loader.model_index import (
    MODEL_INDEX,
    SAMPLING_DEFAULTS,
    components_of,
    read_model_index,
)
from sglang.multimodal_gen.runtime.loader.safetensors_header import read_header
from sglang.multimodal_gen.runtime.utils.errors import (
    CheckpointError,
    InvalidArgument,
    ModelNotFound,
)
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

Kind = Literal["bundled", "local", "hub"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")


@dataclass(frozen=True, slots=True)
class Layout:
    """What a checkpoint without ``model_index.json`` is taken for.

    ``components`` are the pipeline's component folders; ``denoiser`` the one whose weights a
    checkpoint of a single file holds.
    """

    pipeline: str
    components: tuple[str, ...]
    denoiser: str = "transformer"


LayoutOf = Callable[[], Layout | None]
"""Asked only where there is no ``model_index.json``."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A checkpoint that was found: what the user called it, where it is, what it consists of.

    Without a ``model_index.json``, ``indexed`` is False and ``model_index`` names the pipeline
    alone: a component is the folder of its name. ``weights_files`` are files that hold a
    component's weights apart from its folder: not empty for a checkpoint of one file.
    """

    name: str
    root: Path
    model_index: Mapping[str, Any]
    kind: Kind
    indexed: bool = True
    weights_files: Mapping[str, Path] = field(default_factory=dict)

    @property
    def class_name(self) -> str | None:
        """``_class_name`` of the model index: the reference pipeline's class."""
        return self.model_index.get("_class_name")

    @property
    def components(self) -> dict[str, tuple[str, str]]:
        """Component name -> (library, class name), for those that are present.

        Raises:
            CheckpointError: an entry is neither a pair of names nor null.
        """
        return components_of(self.model_index, self.root)


def bundled_models() -> dict[str, Path]:
    """The models that ship inside this package: name -> folder."""
    root = Path(str(resources.files("sglang.multimodal_gen"))) / "bundled"
    return {p.parent.name: p.parent for p in sorted(root.glob(f"*/{MODEL_INDEX}"))}


def is_hub_id(model_path: str) -> bool:
    """Whether `resolve_model_source` would ask the hub: it has the form, and nothing is here."""
    here = model_path in bundled_models() or Path(model_path).expanduser().exists()
    return not here and _HUB_ID.fullmatch(model_path) is not None


def _no_layout() -> Layout | None:
    return None


def resolve_model_source(
    model_path: str,
    revision: str | None = None,
    layout_of: LayoutOf = _no_layout,
    known_ids: Collection[str] = (),
) -> ModelSource:
    """Find a model: an existing folder, a bundled name, or a hub id (fetched if not cached).

    A local path or bundled name never touches the network. ``layout_of`` says what a checkpoint
    without ``model_index.json`` is, a folder or one safetensors file; None refuses it.
    ``known_ids`` are hub ids to suggest to who gives half of one.

    Raises:
        ModelNotFound: nothing is there; says what was tried and what to do.
        CheckpointError: the folder's ``model_index.json`` is damaged.
    """
    try:
        path = Path(model_path).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as problem:  # too long, no such ~user, NUL byte
        raise ModelNotFound(f"model_path={model_path!r} is no usable path: {problem}") from problem
    bundled = bundled_models()
    if revision is not None and (model_path in bundled or path.exists()):
        problem = f"is for hub ids; {model_path!r} is here already. Leave it out"
        raise InvalidArgument("revision", revision, problem)
    if model_path in bundled and not (path / MODEL_INDEX).is_file():
        return _source(model_path, bundled[model_path], "bundled")
    if path.is_dir():
        if not (path / MODEL_INDEX).is_file():
            layout = layout_of()
            if layout is not None and _has_components(path, layout):
                return _unindexed(model_path, path, "local", layout)
            raise ModelNotFound(
                f"model_path={model_path!r} has no {MODEL_INDEX}. {_what_it_is(path)}"
            )
        return _source(model_path, path, "local")
    if path.exists():
        return _one_file(model_path, path, layout_of)
    if _HUB_ID.fullmatch(model_path):
        return _from_hub(model_path, revision, layout_of)
    raise ModelNotFound(
        f"model_path={model_path!r}: no such folder, no bundled model and no hub id "
        f"(org/name).{_near(model_path, bundled, known_ids)} Bundled: "
        f"{', '.join(bundled) or 'none'}. A hub id needs its organisation too; what has no native "
        "family runs by the Diffusers backend (--backend diffusers)"
    )


def _near(given: str, bundled: Collection[str], known_ids: Collection[str]) -> str:
    """A bundled name, or a hub id whose second half is near."""
    halves = {known.rpartition("/")[2].lower(): known for known in known_ids}
    found = did_you_mean(given, bundled)
    if found or not halves:
        return found
    near = get_close_matches(given.lower(), halves, n=3, cutoff=0.6)
    if given.lower() in halves:
        near = [given.lower()]
    return f" Did you mean {' or '.join(repr(halves[half]) for half in near)}?" if near else ""


def read_sampling_defaults(root: Path) -> dict[str, Any]:
    """The checkpoint's own sampling defaults (``sampling_params.json``); empty without the file.

    Raises:
        CheckpointError: the file is there and no JSON object.
    """
    path = root / SAMPLING_DEFAULTS
    return read_json_object(path) if os.path.lexists(path) else {}


def _source(name: str, root: Path, kind: Kind) -> ModelSource:
    return ModelSource(name=name, root=root, model_index=read_model_index(root), kind=kind)


def _unindexed(name: str, root: Path, kind: Kind, layout: Layout) -> ModelSource:
    return ModelSource(name, root, {"_class_name": layout.pipeline}, kind, indexed=False)


def _has_components(folder: Path, layout: Layout) -> bool:
    return any((folder / name).is_dir() for name in layout.components)


def _one_file(model_path: str, path: Path, layout_of: LayoutOf) -> ModelSource:
    """A safetensors file as the denoiser's weights; its folder may hold the denoiser's config."""
    layout = layout_of() if path.name.endswith(SUFFIX) else None
    if layout is None:
        raise ModelNotFound(f"model_path={model_path!r} is a file. {_what_file(path)}")
    return ModelSource(
        model_path,
        path.parent,
        {"_class_name": layout.pipeline},
        "local",
        indexed=False,
        weights_files={layout.denoiser: path},
    )


def _from_hub(repo_id: str, revision: str | None, layout_of: LayoutOf) -> ModelSource:
    layout = layout_of()
    root = fetch_from_hub(repo_id, revision, None if layout is None else layout.components)
    if layout is None or (root / MODEL_INDEX).is_file():
        return _source(repo_id, root, "hub")
    return _unindexed(repo_id, root, "hub", layout)


def _what_file(path: Path) -> str:
    if path.name.endswith(SUFFIX):
        return (
            "With --pipeline NAME (`sglang models` lists them) it is the weights of that "
            "pipeline's transformer, and --component-paths.NAME gives the other components."
        )
    if path.name == MODEL_INDEX:
        return f"Give its folder instead: {path.parent}"
    if path.name.endswith(PICKLE_SUFFIXES):
        return "Pickle checkpoints are refused: loading one can run code of whoever made it."
    return f"A model is a folder in the Diffusers layout, with a {MODEL_INDEX}."


def _what_it_is(folder: Path) -> str:
    """What a folder without ``model_index.json`` seems to be, and what to give instead."""
    names = {entry.name for entry in folder.iterdir()}
    if not names:
        return "The folder is empty."
    inner = sorted(folder.glob(f"*/{MODEL_INDEX}")) or sorted(
        folder.glob(f"snapshots/*/{MODEL_INDEX}")
    )
    if inner:
        return f"Give the folder inside it instead: {inner[0].parent}"
    weights = sorted(name for name in names if name.endswith(SUFFIX))
    if "adapter_config.json" in names or any(_is_lora(folder / name) for name in weights):
        return "It looks like a LoRA: give the model that it was made for as the model."
    if "config.json" in names:
        return _what_component(folder)
    if weights:
        return (
            f"It holds single-file weights ({weights[0]}); a model is a folder in the Diffusers "
            "layout, one folder for each component."
        )
    if any(name.endswith(PICKLE_SUFFIXES) for name in names):
        return "It holds pickle checkpoints, which are refused: loading one can run code."
    return "A model is a folder in the Diffusers layout: is the download complete?"


def _what_component(folder: Path) -> str:
    above = folder.resolve().parent
    remedy = f" Give the folder above it: {above}" if (above / MODEL_INDEX).is_file() else ""
    try:
        config = read_json_object(folder / "config.json")
    except CheckpointError:
        config = {}
    if "_class_name" in config:
        what = f"It looks like one component ({config['_class_name']}), not a whole pipeline."
    elif "model_type" in config and not remedy:
        what = (
            f"It looks like a Transformers model (model_type {config['model_type']!r}), not a "
            "diffusion pipeline."
        )
    else:
        what = "It looks like one component, not a whole pipeline."
    return what + remedy


def _is_lora(path: Path) -> bool:
    try:
        return any("lora" in name.lower() for name in read_header(path))
    except CheckpointError:
        return False
