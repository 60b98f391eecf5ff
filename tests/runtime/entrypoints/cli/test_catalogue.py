from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang.multimodal_gen.registry import known_models
from sglang.multimodal_gen.runtime.entrypoints.cli import catalogue
from sglang.multimodal_gen.runtime.models.dits.flux import FluxTransformer2DModel
from sglang.multimodal_gen.runtime.pipelines.flux import FluxPipeline

PAGE = Path(__file__).parents[4] / "docs/supported_models.md"


def test_the_page_is_what_the_command_prints():
    """In a process of its own: other tests may have registered families of theirs in this one."""
    program = "sglang.multimodal_gen.runtime.entrypoints.cli.main"
    done = subprocess.run(
        [sys.executable, "-m", program, "models", "--markdown"],
        env={name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert PAGE.read_text(encoding="utf-8") == done.stdout, (
        f"docs/supported_models.md is stale; write it again: {catalogue.REGENERATE}"
    )


def test_every_registered_id_is_on_it():
    page = PAGE.read_text(encoding="utf-8")
    paths = [path for known in known_models() for path in known.paths]
    assert paths
    assert not [path for path in paths if f"`{path}`" not in page]


@pytest.mark.parametrize(("mechanism", "attribute"), catalogue.DENOISER_DECLARES.items())
def test_a_mechanism_is_what_the_denoiser_declares(monkeypatch, mechanism, attribute):
    def row() -> str:
        (line,) = [line for line in catalogue.markdown().splitlines() if "FLUX.1-dev" in line]
        return line.rpartition("| ")[2]

    # Where the family declares it already, the other half of the test is what says something.
    places = FluxTransformer2DModel, sys.modules[FluxTransformer2DModel.__module__]
    for place in places:
        for other in places:
            monkeypatch.setattr(other, attribute, {}, raising=False)
        assert mechanism not in row()
        monkeypatch.delattr(FluxTransformer2DModel, attribute)  # its own would go first
        monkeypatch.setattr(place, attribute, {"a": "plan"}, raising=False)
        assert mechanism in row()
    assert "LoRA" in row()


def test_lora_is_what_all_pipelines_take(monkeypatch):
    class NoAdapters:
        __module__ = FluxPipeline.__module__

    assert "LoRA" in catalogue.markdown()
    monkeypatch.setattr(catalogue.REGISTRY, "get_pipeline_class", lambda name: NoAdapters)
    assert "LoRA" not in catalogue.markdown()
