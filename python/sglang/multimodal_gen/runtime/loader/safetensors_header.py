"""The header of a safetensors file, read before anything is trusted or allocated.

Layout of the format: 8 bytes little-endian header length ``n``, ``n`` bytes of JSON
(``name -> {dtype, shape, data_offsets}``), then the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

# The format's own limit. A longer claim means that the file is something else.
MAX_HEADER_BYTES = 100_000_000

BITS_PER_ELEMENT: dict[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as it lies in a file: where, in which format dtype, how large.

    ``offset`` is the first byte in the file; ``nbytes`` its length there.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors that a safetensors file holds, checked against the file's size.

    Reads the header only. Raises CheckpointError in one line with the path and the likely cause
    for anything that is not a complete safetensors file; never changes the file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            head = stream.read(min(size, 256))
            length = _header_length(path, head, size)
            stream.seek(8)
            text = stream.read(length)
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}.") from problem
    entries = _parse(path, text)
    data_start = 8 + length
    tensors = {name: _entry(path, name, entry, data_start) for name, entry in entries.items()}
    _check_coverage(path, tensors, data_start, size)
    return tensors


def _header_length(path: Path, head: bytes, size: int) -> int:
    if size == 0:
        raise CheckpointError(f"{path} is empty (0 bytes). Likely cause: an interrupted download.")
    length = int.from_bytes(head[:8], "little")
    plausible = size > 8 and 2 <= length <= MAX_HEADER_BYTES and head[8:9] == b"{"
    if not plausible and (impostor := _impostor(head)):
        raise CheckpointError(f"{path} is not a safetensors file: {impostor}")
    if size < 8:
        raise CheckpointError(
            f"{path} is truncated: {size} bytes, a safetensors file starts with 8 bytes of header "
            "length. Likely cause: an interrupted download."
        )
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} is not a safetensors file: its first 8 bytes claim a header of {length} bytes "
            f"(at most {MAX_HEADER_BYTES}). Likely cause: a damaged file or another format."
        )
    if size > 8 and not plausible:
        raise CheckpointError(
            f"{path} is not a safetensors file: no JSON header after the first 8 bytes. "
            "Likely cause: a damaged file or another format."
        )
    if 8 + length > size:
        raise CheckpointError(
            f"{path} is truncated inside its header: {8 + length - size} bytes of the header and "
            "all tensors are missing. Likely cause: an interrupted download."
        )
    return length


def _impostor(head: bytes) -> str:
    """What a file that only carries the suffix really is; empty when nothing is recognised."""
    text = head.lstrip()
    if head.startswith(b"version https://git-lfs"):
        size = re.search(rb"^size (\d+)", head, re.MULTILINE)
        real = f" of a file of {int(size[1])} bytes" if size else ""
        return f"it is the Git LFS pointer{real}. Run `git lfs pull` in the repository."
    if text[:1] == b"<":
        return "it is a web page saved under this name. Download the file itself again."
    if text[:2] in (b'{"', b"{\n", b"{ ", b"{}"):
        return "it is JSON text, perhaps a server's error message. Download the file again."
    if head.startswith((b"PK\x03\x04", b"\x80\x02}", b"\x80\x02c", b"\x80\x04\x95")):
        return (
            "it is a pickle (torch.save) under another name. Loading one can run code of whoever "
            "made it, so it is refused."
        )
    if head.startswith(b"GGUF"):
        return "it is a GGUF file."
    return ""


def _parse(path: Path, text: bytes) -> dict[str, object]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(
            f"{path} has a damaged header: not JSON ({problem}). Likely cause: a damaged file."
        ) from problem
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a damaged header: not a JSON object.")
    header.pop("__metadata__", None)
    return header


def _entry(path: Path, name: str, entry: object, data_start: int) -> StoredTensor:
    problem = _entry_problem(entry)
    if problem:
        raise CheckpointError(
            f"{path} has a damaged header: tensor {name!r} {problem}. Likely cause: a damaged file."
        )
    assert isinstance(entry, dict)
    begin, end = entry["data_offsets"]
    return StoredTensor(
        path, entry["dtype"], tuple(entry["shape"]), data_start + begin, end - begin
    )


def _entry_problem(entry: object) -> str:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        return "has no dtype, shape or data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS_PER_ELEMENT:
        return f"has the unknown dtype {dtype!r}"
    if not _are_sizes(shape):
        return f"has the impossible shape {shape!r}"
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"has the impossible data_offsets {offsets!r}"
    bits = math.prod(shape) * BITS_PER_ELEMENT[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        return f"({dtype} {shape}) does not fill its data_offsets {offsets}"
    return ""


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_coverage(
    path: Path, tensors: dict[str, StoredTensor], data_start: int, size: int
) -> None:
    """Refuse gaps, overlaps, a short file and trailing bytes."""
    position = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != position:
            kind = "overlaps the one before it" if tensor.offset < position else "leaves a gap"
            raise CheckpointError(
                f"{path} has a damaged header: tensor {name!r} {kind}. "
                "Likely cause: a damaged file."
            )
        position += tensor.nbytes
    if position > size:
        raise CheckpointError(
            f"{path} is truncated: {position - size} of {position} bytes are missing. "
            "Likely cause: an interrupted download."
        )
    if position < size:
        raise CheckpointError(
            f"{path} is {size - position} bytes longer than its header says. "
            "Likely cause: a damaged file or two files written over each other."
        )
