"""Which files of a component folder hold its weights, and what they store.

Rules, in order; a canonical name (``diffusion_pytorch_model``, ``model``) wins within each:

1. A ``*.safetensors.index.json`` is authoritative: only the shards that it names are read.
2. Else the one safetensors file.
3. Where there is nothing else, the same for a variant (``model.fp16.safetensors``). Variants are
   never mixed with each other or with plain files.

Anything else is an error: ambiguity, a missing shard, shards without an index, pickle files. Only
headers are read here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType

from sglang.multimodal_gen.runtime.loader.json_file import read_json_object
from sglang.multimodal_gen.runtime.loader.safetensors_header import StoredTensor, read_header
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

SUFFIX = ".safetensors"
CANONICAL_FILES = ("diffusion_pytorch_model.safetensors", "model.safetensors")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SHOWN = 8

_INDEX = re.compile(r"\.safetensors\.index(\.\w+)?\.json$")
_VARIANT = re.compile(r"\.(fp8|fp16|bf16|fp32|ema|non_ema)$")
_SHARD = re.compile(r"-\d{5}-of-(?!00001)\d{5}(?=\.)")  # one of many; "of one" is a whole file


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights of one component: every stored tensor and the file that holds it.

    ``path`` is the folder or file that was asked for; ``files`` what is read, in order;
    ``unused`` safetensors files of the folder that the rules above leave alone.
    """

    path: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    unused: tuple[Path, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def find_checkpoint(path: Path) -> Checkpoint:
    """The weights under a component folder, or in one named safetensors or index file.

    Raises:
        CheckpointError: in one line, with the path and the likely cause, before any allocation.
    """
    if path.is_file():
        return _from_file(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist.")
    names = sorted(
        entry.name for entry in path.iterdir() if entry.is_file() and entry.name[:1] != "."
    )
    chosen = path / choose_weight_file(names, path)
    files, tensors = _read(chosen)
    unused = tuple(
        path / name for name in names if name.endswith(SUFFIX) and path / name not in files
    )
    return Checkpoint(path, files, MappingProxyType(tensors), unused)


def choose_weight_file(names: Collection[str], folder: Path) -> str:
    """The index or single file that holds a folder's weights, by the rules of this module.

    Args:
        names: the file names of the folder.
        folder: named in error messages.

    Raises:
        CheckpointError: nothing can be chosen, or more than one file equally well.
    """
    weights = [name for name in names if name.endswith(SUFFIX)]
    indexes = [name for name in names if _INDEX.search(name)]
    if not weights and not indexes:
        raise CheckpointError(_no_weights(names, folder))
    singles = [name for name in weights if not _SHARD.search(name)]
    for variant in (False, True):
        candidates = [name for name in indexes if _is_variant(name) is variant]
        if candidates:
            return _only(candidates, folder, "index files")
        candidates = [name for name in singles if _is_variant(name) is variant]
        shards = [n for n in weights if n not in singles and _is_variant(n) is variant]
        if shards and not any(name in CANONICAL_FILES for name in candidates):
            raise CheckpointError(
                f"{folder} holds shards ({listed(shards)}) but no *.safetensors.index.json that "
                "says which belong together. Likely cause: an incomplete download."
            )
        if candidates:
            return _only(candidates, folder, "weight files")
    raise AssertionError("every weight file is a variant or none")


def listed(names: Iterable[object], limit: int = SHOWN) -> str:
    """Names for an error message: the first few, and how many more there are."""
    items = [str(name) for name in names]
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def _from_file(path: Path) -> Checkpoint:
    if path.name.endswith(PICKLE_SUFFIXES):
        raise CheckpointError(_pickle_refused(f"{path} is a pickle file, which is"))
    if not (path.name.endswith(SUFFIX) or _INDEX.search(path.name)):
        raise CheckpointError(f"{path} is neither a {SUFFIX} file nor a {SUFFIX}.index.json.")
    files, tensors = _read(path)
    return Checkpoint(path, files, MappingProxyType(tensors))


def _read(path: Path) -> tuple[tuple[Path, ...], dict[str, StoredTensor]]:
    if path.name.endswith(SUFFIX):
        return (path,), read_header(path)
    return _read_indexed(path)


def _read_indexed(index: Path) -> tuple[tuple[Path, ...], dict[str, StoredTensor]]:
    """The tensors that an index names, each found in the header of its shard."""
    names_by_shard: dict[str, list[str]] = {}
    for tensor, shard in _weight_map(index).items():
        names_by_shard.setdefault(shard, []).append(tensor)
    folder = index.parent
    missing = [shard for shard in sorted(names_by_shard) if not (folder / shard).is_file()]
    if missing:
        raise CheckpointError(_missing_shards(index, missing, names_by_shard))
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(names_by_shard):
        stored = read_header(folder / shard)
        absent = [name for name in names_by_shard[shard] if name not in stored]
        if absent:
            raise CheckpointError(
                f"{index} places {len(absent)} tensors in {shard} that are not there: "
                f"{listed(absent)}. Likely cause: index and shards come from different checkpoints."
            )
        tensors.update((name, stored[name]) for name in names_by_shard[shard])
    return tuple(folder / shard for shard in sorted(names_by_shard)), tensors


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map (tensor name -> file name).")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(SUFFIX):
            raise CheckpointError(
                f"{index} places {tensor!r} in {shard!r}, which is not a {SUFFIX} file."
            )
        # Lexical on purpose: the files of a hub cache are links that lead out of their folder.
        parts = PurePosixPath(shard).parts
        if ".." in parts or shard.startswith("/") or "\\" in shard or PureWindowsPath(shard).drive:
            raise CheckpointError(
                f"{index} names {shard!r}, a path outside its own folder: refused."
            )
    return weight_map


def _missing_shards(index: Path, missing: list[str], names: Mapping[str, list[str]]) -> str:
    tensors = [name for shard in missing for name in names[shard]]
    folder = index.parent
    text = (
        f"{index} names {len(missing)} of {len(names)} files that are not there: "
        f"{listed(missing)}. They hold {len(tensors)} tensors: {listed(tensors)}. "
        "Likely cause: an incomplete download or a deleted shard."
    )
    others = [path.name for path in folder.glob(f"*{SUFFIX}") if path.name not in names]
    if others:
        text += (
            f" The folder also holds {listed(sorted(others))}: if that is the whole checkpoint, "
            "the index is stale and can go."
        )
    return text


def _only(names: Collection[str], folder: Path, what: str) -> str:
    """The one candidate: canonical names count first."""
    canonical = [name for name in names if name.removesuffix(".index.json") in CANONICAL_FILES]
    candidates = canonical or list(names)
    if len(candidates) > 1:
        raise CheckpointError(
            f"{folder} holds {len(candidates)} {what} and nothing says which one is meant: "
            f"{listed(candidates)}. Keep one of them."
        )
    return candidates[0]


def _is_variant(name: str) -> bool:
    """Whether a name says fp16, bf16, ema...: ``model.fp16.safetensors`` and its index forms."""
    if match := _INDEX.search(name):
        return match[1] is not None or _is_variant(name[: match.start()] + SUFFIX)
    return _VARIANT.search(_SHARD.sub("", name).removesuffix(SUFFIX)) is not None


def _no_weights(names: Collection[str], folder: Path) -> str:
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        return _pickle_refused(f"{folder} holds only pickle weights ({listed(pickles)}), which are")
    found = f"it holds {listed(names)}" if names else "it is empty"
    return f"{folder} holds no weights (*{SUFFIX}): {found}. Likely cause: an incomplete download."


def _pickle_refused(what: str) -> str:
    return (
        f"{what} refused: loading a pickle can run code of whoever made it. Use the publisher's "
        "safetensors files, or convert a file that you trust: "
        "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')."
    )
