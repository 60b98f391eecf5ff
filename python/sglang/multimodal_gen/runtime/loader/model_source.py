"""From what a user calls a model to a folder with a ``model_index.json``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from sglang.multimodal_gen.runtime.loader.json_file import read_json_object
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, ModelNotFound
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

MODEL_INDEX = "model_index.json"
SAMPLING_DEFAULTS = "sampling_params.json"
Kind = Literal["bundled", "local", "hub"]

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
# Never pickle files, and nothing outside the components that model_index.json names.
_FILE_TYPES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A checkpoint that was found: what the user called it, where it is, what it consists of."""

    name: str
    root: Path
    model_index: Mapping[str, Any]
    kind: Kind

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
        found = {}
        for name, entry in self.model_index.items():
            if name.startswith("_") or not isinstance(entry, (list, tuple)):
                continue
            if len(entry) != 2 or not all(e is None or isinstance(e, str) for e in entry):
                raise CheckpointError(
                    f"{self.root / MODEL_INDEX}: {name} must be [library, class] or null, "
                    f"not {entry!r}"
                )
            if entry[0] is not None and entry[1] is not None:
                found[name] = (entry[0], entry[1])
        return found


def bundled_models() -> dict[str, Path]:
    """The models that ship inside this package: name -> folder."""
    root = Path(str(resources.files("sglang.multimodal_gen"))) / "bundled"
    if not root.is_dir():
        return {}
    return {p.parent.name: p.parent for p in sorted(root.glob(f"*/{MODEL_INDEX}"))}


def resolve_model_source(model_path: str, revision: str | None = None) -> ModelSource:
    """Find a model: an existing folder, a bundled name, or a hub id (fetched if not cached).

    A local path or bundled name never touches the network.

    Raises:
        ModelNotFound: nothing is there; says what was tried and what to do.
        CheckpointError: the folder's ``model_index.json`` is damaged.
    """
    path = Path(model_path).expanduser()
    bundled = bundled_models()
    if model_path in bundled and not (path / MODEL_INDEX).is_file():
        return _from_folder(model_path, bundled[model_path], "bundled")
    if path.exists():
        return _from_folder(model_path, path, "local")
    if _HUB_ID.match(model_path) and not model_path.startswith("."):
        return _from_folder(model_path, _fetch(model_path, revision), "hub")
    raise ModelNotFound(
        f"model_path={model_path!r}: no such folder, no bundled model and no hub id "
        f"(org/name).{did_you_mean(model_path, bundled)} Bundled: {', '.join(bundled) or 'none'}"
    )


def read_sampling_defaults(root: Path) -> dict[str, Any]:
    """The checkpoint's own sampling defaults (``sampling_params.json``); empty without the file.

    Raises:
        CheckpointError: the file is no JSON object.
    """
    path = root / SAMPLING_DEFAULTS
    return read_json_object(path) if path.is_file() else {}


def _from_folder(name: str, root: Path, kind: Kind) -> ModelSource:
    if not root.is_dir():
        raise ModelNotFound(
            f"model_path={name!r} is a file; give the folder that holds {MODEL_INDEX}"
        )
    if not (root / MODEL_INDEX).is_file():
        raise ModelNotFound(f"model_path={name!r}: no {MODEL_INDEX} there.{_what_it_is(root)}")
    index = read_json_object(root / MODEL_INDEX)
    if not isinstance(index.get("_class_name"), str):
        raise CheckpointError(f"{root / MODEL_INDEX} has no _class_name: the pipeline's class")
    source = ModelSource(name=name, root=root, model_index=index, kind=kind)
    _ = source.components  # refuses malformed entries now
    return source


def _what_it_is(root: Path) -> str:
    """What a folder that is no pipeline looks like."""
    names = {p.name for p in root.iterdir()}
    if not names:
        return " The folder is empty."
    if "adapter_config.json" in names or "pytorch_lora_weights.safetensors" in names:
        return " It looks like a LoRA adapter; give the base model's folder."
    if "config.json" in names:
        config = read_json_object(root / "config.json")
        if "_class_name" in config:
            return f" It looks like one component ({config['_class_name']}); give its parent."
        if "architectures" in config or "model_type" in config:
            return " It looks like a Transformers model, not a diffusion pipeline."
    inner = [p.parent.name for p in root.glob(f"*/{MODEL_INDEX}")]
    return f" Did you mean its folder {inner[0]!r}?" if inner else ""


def _fetch(repo_id: str, revision: str | None) -> Path:
    """The local snapshot of a hub repository: its root files and the components it names."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        index_file = hf_hub_download(repo_id, MODEL_INDEX, revision=revision)
        index = read_json_object(Path(index_file))
        folders = [n for n, e in index.items() if isinstance(e, list) and e and e[0] is not None]
        patterns = [MODEL_INDEX, SAMPLING_DEFAULTS]
        patterns += [f"{folder}/{kind}" for folder in folders for kind in _FILE_TYPES]
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        problem = "access is gated: accept its terms on the hub and log in with `hf auth login`"
        raise ModelNotFound(f"model_path={repo_id!r}: {problem}") from error
    except RepositoryNotFoundError as error:
        problem = "the hub knows no such repository (or it is private: `hf auth login`)"
        raise ModelNotFound(f"model_path={repo_id!r}: {problem}") from error
    except RevisionNotFoundError as error:
        raise ModelNotFound(f"model_path={repo_id!r}: no revision {revision!r}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        problem = (
            "not in the local cache, and the hub cannot be reached (or HF_HUB_OFFLINE is set); "
            "download it once, or give a local folder"
        )
        raise ModelNotFound(f"model_path={repo_id!r}: {problem}") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelNotFound(f"model_path={repo_id!r}: the hub did not answer: {error}") from error
