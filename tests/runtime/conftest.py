from __future__ import annotations

from pathlib import Path

import pytest

from parity.tiny_checkpoints import flux_for_ranks


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny FLUX-layout checkpoint for all doors to open, on one rank or two; never changed."""
    path = tmp_path_factory.mktemp("tiny") / "flux"
    flux_for_ranks().write(path)
    return path
