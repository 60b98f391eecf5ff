"""Checkpoints from a model hub, through ``huggingface_hub``: cached, resumable, never a pickle."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TypeVar

from sglang.multimodal_gen.runtime.loader.checkpoint import PICKLE_SUFFIXES, SUFFIX
from sglang.multimodal_gen.runtime.loader.model_index import (
    MODEL_INDEX,
    SAMPLING_DEFAULTS,
    components_of,
    read_model_index,
)
from sglang.multimodal_gen.runtime.utils.errors import ModelNotFound

T = TypeVar("T")

_WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
_VARIANTS = tuple(
    f"*.{v}[.-]*safetensors" for v in ("fp8", "fp16", "bf16", "fp32", "ema", "non_ema")
)


def fetch_from_hub(
    repo_id: str,
    revision: str | None,
    without_index: Collection[str] | None = None,
    *,
    weights: bool = True,
) -> Path:
    """The local snapshot folder of a hub repository, fetched where the cache lacks it.

    ``model_index.json`` first, then the folders of the components that it names, at the same
    commit. ``without_index`` names the folders to fetch where there is no such file, which is an
    error if it is None. Without ``weights``, configs and tokenizers alone. Honours ``HF_HOME``,
    ``HF_HUB_OFFLINE`` and ``HF_TOKEN``, because the library does.

    Raises:
        ModelNotFound: with the reason (no such repository, gated, offline...) and the remedy.
        CheckpointError: the fetched ``model_index.json`` is malformed.
    """
    from huggingface_hub import constants, hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError

    def fetch(patterns: Iterable[str], ignored: Iterable[str] = ()) -> str:
        return snapshot_download(
            repo_id,
            revision=commit,
            allow_patterns=list(patterns),
            ignore_patterns=[*ignored, *(f"*{suffix}" for suffix in PICKLE_SUFFIXES)],
            # Said again because release 1 of the library asks the network for a commit's file list
            # even when all of it is cached.
            local_files_only=constants.HF_HUB_OFFLINE,
        )

    def find_root() -> Path:
        try:
            return Path(hf_hub_download(repo_id, MODEL_INDEX, revision=revision)).parent
        except EntryNotFoundError:  # on the hub, or in the cache without a network
            if without_index is None:
                raise
            return Path(fetch([SAMPLING_DEFAULTS, *(f"{name}/*.json" for name in without_index)]))

    commit = revision
    root = _translated(repo_id, revision, find_root)
    commit = root.name if root.parent.name == "snapshots" else revision
    components: Collection[str] = without_index or ()
    if without_index is None or (root / MODEL_INDEX).is_file():
        components = components_of(read_model_index(root), root)
    patterns = [p for p in _WANTED if weights or not p.endswith(SUFFIX)]
    wanted = [f"{name}/{pattern}" for name in components for pattern in patterns]
    wanted += [MODEL_INDEX, SAMPLING_DEFAULTS]
    _translated(repo_id, revision, lambda: fetch(wanted, _VARIANTS))
    # Some repositories publish a component as a variant only: then the variant is what there is.
    bare = [name for name in components if _lacks_weights(root / name)]
    if bare and weights:
        _translated(repo_id, revision, lambda: fetch(f"{name}/*{SUFFIX}" for name in bare))
    return root


def fetch_adapter_from_hub(repo_id: str, wanted: Collection[str]) -> Path:
    """The local snapshot folder of a repository, with the files ``wanted`` as far as it has them.

    Raises:
        ModelNotFound: with the reason (no such repository, gated, offline...) and the remedy.
    """
    from huggingface_hub import constants, snapshot_download

    def fetch() -> str:
        return snapshot_download(
            repo_id,
            revision=None,
            allow_patterns=list(wanted),
            ignore_patterns=[f"*{suffix}" for suffix in PICKLE_SUFFIXES],
            local_files_only=constants.HF_HUB_OFFLINE,
        )

    return Path(_translated(repo_id, None, fetch, "lora_path"))


def files_on_hub(repo_id: str, folder: Path) -> list[str]:
    """The names of a repository's files; without a network those in its snapshot ``folder``.

    Raises:
        ModelNotFound: the hub does not answer, or does not show the repository.
    """
    from huggingface_hub import constants, list_repo_files

    if constants.HF_HUB_OFFLINE:
        files = (path for path in folder.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(folder)) for path in files)
    return sorted(_translated(repo_id, None, lambda: list_repo_files(repo_id), "lora_path"))


def _lacks_weights(folder: Path) -> bool:
    return (folder / "config.json").is_file() and not any(folder.glob(f"*{SUFFIX}"))


def _translated(
    repo_id: str, revision: str | None, fetch: Callable[[], T], field: str = "model_path"
) -> T:
    """Run one fetch; the library's errors become sentences that name value and remedy."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = f"{field}={repo_id!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        return fetch()
    except HFValidationError as problem:
        raise ModelNotFound(f"{what} is no folder here, and no hub id: {problem}") from problem
    except GatedRepoError as problem:
        raise ModelNotFound(
            f"{what}: the repository is gated. Accept its terms on its hub page and log in with "
            "`hf auth login` (or set HF_TOKEN)."
        ) from problem
    except RepositoryNotFoundError as problem:
        raise ModelNotFound(
            f"{what} is neither a folder here nor a repository that the hub shows. Check the "
            "spelling; for a private repository log in with `hf auth login`."
        ) from problem
    except RevisionNotFoundError as problem:
        raise ModelNotFound(
            f"{what}: the repository has no such branch, tag or commit."
        ) from problem
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as problem:
        why = (
            "HF_HUB_OFFLINE is set. Unset it once to download"
            if constants.HF_HUB_OFFLINE
            else "the hub cannot be reached. Check the connection"
        )
        raise ModelNotFound(
            f"{what} is no folder here and not in the cache {constants.HF_HUB_CACHE}, and {why}, "
            "or give a local folder."
        ) from problem
    except EntryNotFoundError as problem:
        raise ModelNotFound(
            f"{what} has no {MODEL_INDEX}: it is no pipeline in the Diffusers layout."
        ) from problem
    except (HfHubHTTPError, OSError) as problem:
        raise ModelNotFound(f"{what} could not be fetched: {problem}") from problem
