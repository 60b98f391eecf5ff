from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import diffusers
import pytest
import torch
import transformers


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny checkpoints of this session."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> Iterator[None]:
    """One thread (tiny matrices; two runs then add up in the same order) and no progress bars."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)
    diffusers.utils.logging.enable_progress_bar()
    transformers.utils.logging.enable_progress_bar()
