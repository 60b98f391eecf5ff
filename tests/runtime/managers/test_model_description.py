from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass

import pytest

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
from sglang.multimodal_gen.configs.pipeline_configs.flux import FluxPipelineConfig
from sglang.multimodal_gen.configs.task_type import ModelTaskType
from sglang.multimodal_gen.registry import REGISTRY, Registry
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.sections import ModelArgs
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, InvalidArgument

SMALL = {"height": 32, "width": 32, "num_inference_steps": 1, "max_sequence_length": 16}


CONFIG = "config.json"
FAULTS = [
    ("transformer", CONFIG, {"axes_dims_rope": [5, 5, 6]}),
    ("transformer", CONFIG, {"axes_dims_rope": [8, 8]}),
    ("transformer", CONFIG, {"num_layers": -1}),
    ("transformer", CONFIG, {"num_layers": "two"}),
    ("vae", CONFIG, {"scaling_factor": "1.5"}),
    ("vae", CONFIG, {"scaling_factor": 0}),
    ("vae", CONFIG, {"norm_num_groups": 0}),
    ("vae", CONFIG, {"block_out_channels": 16}),
    ("vae", CONFIG, {"block_out_channels": [16]}),
    ("text_encoder", CONFIG, {"num_attention_heads": 0}),
    ("scheduler", "scheduler_config.json", {"num_train_timesteps": 0}),
]


@pytest.mark.parametrize(("component", "name", "change"), FAULTS)
def test_a_config_that_makes_no_sense_is_the_checkpoints_fault(
    folder, tmp_path, component, name, change
):
    copy = tmp_path / "damaged"
    shutil.copytree(folder, copy)
    path = copy / component / name
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError):
        DiffGenerator.from_pretrained(str(copy), device="cpu").generate(prompt="a", **SMALL)


def test_a_scheduler_of_another_family_is_named(folder, tmp_path):
    copy = tmp_path / "other"
    shutil.copytree(folder, copy)
    path = copy / "model_index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps(index | {"scheduler": ["diffusers", "DDIMScheduler"]}))
    with pytest.raises(CheckpointError, match="DDIMScheduler takes no mu, sigmas"):
        DiffGenerator.from_pretrained(str(copy), device="cpu").generate(prompt="a", **SMALL)


def test_a_prompt_is_no_default(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "sampling_params.json").write_text('{"prompt": "a fox"}')
    with pytest.raises(CheckpointError, match="prompt is a request's"):
        DiffGenerator.from_pretrained(str(copy), device="cpu")


def test_a_dangling_defaults_file_is_not_taken_for_none(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "sampling_params.json").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"sampling_params.json"):
        DiffGenerator.from_pretrained(str(copy), device="cpu")


def test_a_revision_of_what_is_here_is_refused(folder):
    with pytest.raises(InvalidArgument, match="revision='abc': is for hub ids"):
        DiffGenerator.from_pretrained(str(folder), device="cpu", revision="abc")


@pytest.mark.parametrize("config", [3, "x", ["dit_precision"]])
def test_a_pipeline_config_of_another_kind_is_refused(folder, config):
    with pytest.raises(InvalidArgument, match="must be a PipelineConfig or a mapping"):
        DiffGenerator.from_pretrained(str(folder), device="cpu", pipeline_config=config)


@dataclass
class OtherConfig(PipelineConfig):
    pass


def test_a_whole_config_of_another_family_is_refused(folder):
    said = r"pipeline_config='OtherConfig': .*FluxPipelineConfig"
    with pytest.raises(InvalidArgument, match=said):
        DiffGenerator.from_pretrained(str(folder), device="cpu", pipeline_config=OtherConfig())


@dataclass
class ByCheckpoint(FluxPipelineConfig):
    """Takes pictures where the checkpoint's autoencoder says so."""

    def get_supported_task_types(self):
        pictures = self.vae_config.scaling_factor == 0.77
        tasks = (ModelTaskType.T2I, ModelTaskType.TI2I) if pictures else (ModelTaskType.T2I,)
        return tasks if self.task_type in tasks else (self.task_type,)


@pytest.mark.parametrize("scaling", [0.77, 0.5])
def test_a_capability_of_the_checkpoint_can_be_the_default_task(
    folder, tmp_path, monkeypatch, scaling
):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    path = copy / "vae/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scaling_factor": scaling}))
    info = dataclasses.replace(
        REGISTRY.find(ModelArgs(model_path=str(copy)))[1], pipeline_config_cls=ByCheckpoint
    )
    find = Registry.find
    monkeypatch.setattr(Registry, "find", lambda self, model: (find(self, model)[0], info))
    args = ServerArgs.from_flat(device="cpu", model_path=str(copy))
    assert ByCheckpoint().get_supported_task_types() == (ModelTaskType.T2I,)
    if scaling == 0.5:
        with pytest.raises(InvalidArgument, match="this pipeline serves T2I"):
            ModelDescription.find(args, {"task_type": "TI2I"})
        return
    found = ModelDescription.find(args, {"task_type": "TI2I", "max_pixels": 9})
    assert found.config.task_type is ModelTaskType.TI2I
    assert found.config.max_pixels == 9
