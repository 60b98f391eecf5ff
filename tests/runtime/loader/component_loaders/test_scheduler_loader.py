from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)

from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import ComponentSpec
from sglang.multimodal_gen.runtime.loader.component_loaders.scheduler_loader import SchedulerLoader
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

FLOW = "FlowMatchEulerDiscreteScheduler"


def _load(folder: Path, architecture: str | None = FLOW, library: str | None = "diffusers") -> Any:
    spec = ComponentSpec(
        name="scheduler",
        path=folder,
        library=library,
        architecture=architecture,
        precision="fp32",
        device="cpu",
    )
    return SchedulerLoader().load(spec).module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True).save_pretrained(tmp_path)
    return tmp_path


def test_a_scheduler_is_made_from_its_config(folder: Path) -> None:
    scheduler = _load(folder)
    assert isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
    assert (scheduler.config["shift"], scheduler.config["use_dynamic_shifting"]) == (3.0, True)


def test_the_class_of_the_index_wins(tmp_path: Path) -> None:
    EulerDiscreteScheduler(beta_end=0.02).save_pretrained(tmp_path)
    scheduler = _load(tmp_path, "DDIMScheduler")
    assert type(scheduler).__name__ == "DDIMScheduler"
    assert scheduler.config.beta_end == 0.02


def test_the_class_of_the_file_serves_without_an_index(folder: Path) -> None:
    assert isinstance(_load(folder, None, None), FlowMatchEulerDiscreteScheduler)


def test_a_registered_scheduler_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(FlowMatchEulerDiscreteScheduler):
        pass

    ModelRegistry.get_supported_archs()
    monkeypatch.setattr(ModelRegistry, "_models", dict(ModelRegistry._models))
    ModelRegistry.register_model("OwnScheduler", Own)
    scheduler = _load(folder, "OwnScheduler", "my_package")
    assert type(scheduler) is Own
    assert scheduler.config["shift"] == 3.0


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"scheduler_config\.json does not exist"):
        _load(tmp_path)


def test_a_scheduler_without_a_class_is_refused(tmp_path: Path) -> None:
    (tmp_path / "scheduler_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="names its class"):
        _load(tmp_path, None)


@pytest.mark.parametrize("name", ["AutoencoderKL", "FluxPipeline"])
def test_what_is_no_scheduler_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name} is no scheduler"):
        _load(folder, name)


def test_a_config_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    config = {"_class_name": "EulerDiscreteScheduler", "beta_schedule": "wavy"}
    (tmp_path / "scheduler_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="does not fit EulerDiscreteScheduler"):
        _load(tmp_path, "EulerDiscreteScheduler")
