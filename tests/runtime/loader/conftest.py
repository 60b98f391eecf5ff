from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import Tensor

WriteShards = Callable[[Path, Mapping[str, Mapping[str, Tensor]]], Path]


@pytest.fixture
def write_shards() -> WriteShards:
    """Writes safetensors files (name -> tensors) and the index that names them all."""

    def write(folder: Path, shards: Mapping[str, Mapping[str, Tensor]]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, tensors in shards.items():
            save_file(dict(tensors), folder / name)
        weight_map = {key: name for name, tensors in shards.items() for key in tensors}
        index: dict[str, Any] = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    return write
