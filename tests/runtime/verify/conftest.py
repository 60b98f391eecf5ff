from __future__ import annotations

import copy
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang.multimodal_gen.registry import REGISTRY
from sglang.multimodal_gen.runtime.entrypoints.cli.main import main

from parity.tiny_checkpoints import flux_dev, flux_for_ranks


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FLUX.1-dev in miniature, with weights that hide nothing."""
    folder = tmp_path_factory.mktemp("verify") / "tiny-dev"
    flux_dev().write(folder)
    return folder


@pytest.fixture(scope="session")
def shared_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with heads that can be dealt over ranks."""
    folder = tmp_path_factory.mktemp("verify") / "tiny-for-ranks"
    flux_for_ranks().write(folder)
    return folder


@pytest.fixture(scope="module")
def ports() -> Iterator[None]:
    """The broken ports, registered as a package of somebody else would be; gone afterwards."""
    REGISTRY._ready()
    before = copy.copy(REGISTRY._pipelines), list(REGISTRY._configs)
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        importlib.import_module("broken_ports")
        yield
    finally:
        sys.path.remove(str(Path(__file__).parent))
        for name in [n for n in sys.modules if n.split(".")[0] == "broken_ports"]:
            del sys.modules[name]
        REGISTRY._pipelines, REGISTRY._configs = before


@pytest.fixture
def verified(tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """``sglang verify ARGUMENTS``: its exit code and its report."""

    def run(*arguments: object) -> tuple[int, dict[str, Any]]:
        report = tmp_path / "report.json"
        code = main(["verify", *map(str, arguments), "--device", "cpu", "--json", str(report)])
        return code, json.loads(report.read_text())

    return run
