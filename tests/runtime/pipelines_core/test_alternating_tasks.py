"""One loaded pipeline, several tasks in turn: no request leaves a trace for the next."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from PIL import Image

from sglang.multimodal_gen.configs.pipeline_configs.base import get_request_task_type
from sglang.multimodal_gen.configs.task_type import ModelTaskType
from sglang.multimodal_gen.runtime.managers.admission import admit
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import InternalError, InvalidRequest

from seed_samples import my_model
from seed_samples.stubs import stub_modules

T2I, I2I = ModelTaskType.T2I, ModelTaskType.I2I


@dataclass
class TwoTaskConfig(my_model.MyModelPipelineConfig):
    supported_task_types = (T2I, I2I)

    def prepare_pos_cond_kwargs(self, batch, latent_model_input, t, **kwargs):
        arguments = super().prepare_pos_cond_kwargs(batch, latent_model_input, t, **kwargs)
        if get_request_task_type(batch, self) is I2I:
            states = arguments["hidden_states"]
            arguments["hidden_states"] = states + batch.image_latent.to(states)
        return arguments


class TwoTaskPipeline(my_model.MyModelPipeline):
    def create_pipeline_stages(self, server_args):
        self.add_standard_ti2i_stages()


@pytest.fixture
def pipeline():
    args = ServerArgs.from_flat(device="cpu", pipeline_config=TwoTaskConfig())
    modules = stub_modules()
    return TwoTaskPipeline("org/two", args, loaded_modules=modules)


def make(pipeline, **values):
    values = {"prompt": "abc", "seed": 1, "height": 32, "width": 48, "num_inference_steps": 3,
              **values}  # fmt: skip
    params = my_model.MyModelSamplingParams.from_values(values)
    (batch,) = admit(params, pipeline.server_args.pipeline_config, batching_max_size=4)
    return pipeline.forward(batch, pipeline.server_args).output


def test_tasks_in_turn_on_one_pipeline_leave_no_trace(pipeline, tmp_path):
    path = tmp_path / "in.png"
    Image.linear_gradient("L").convert("RGB").save(path)
    config = pipeline.server_args.pipeline_config
    before = replace(config)
    text = make(pipeline)
    image = make(pipeline, image_path=str(path))
    assert not torch.equal(text, image), "the tasks must differ to tell anything"
    assert torch.equal(make(pipeline, task_type="t2i"), text)
    assert torch.equal(make(pipeline, task_type=I2I, image_path=str(path)), image)
    with pytest.raises(InvalidRequest, match="needs an input image"):
        make(pipeline, task_type="I2I")
    assert torch.equal(make(pipeline), text)
    assert pipeline.server_args.pipeline_config is config
    assert config == before
    with pytest.raises(InternalError, match="read-only"):
        config.task_type = I2I
