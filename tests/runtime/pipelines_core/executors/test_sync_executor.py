from __future__ import annotations

import pytest
import torch

from sglang.multimodal_gen.runtime.pipelines_core.executors.sync_executor import SyncExecutor
from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError

from seed_samples.stubs import stub_request

ARGS = ServerArgs.from_flat(device="cpu")


class Write(PipelineStage):
    reads = frozenset({"prompt"})
    writes = frozenset({"latents"})

    def forward(self, batch, server_args):
        assert torch.is_inference_mode_enabled()
        batch.latents = torch.ones(1)
        return batch


class Read(PipelineStage):
    reads = frozenset({"latents"})
    writes = frozenset({"output"})

    def forward(self, batch, server_args):
        batch.output = batch.latents + 1
        return batch


def test_stages_run_in_order_and_are_timed():
    batch = SyncExecutor({"write": Write(), "read": Read()}).execute(stub_request(), ARGS)
    assert batch.output == 2
    assert list(batch.timings) == ["write", "read"]
    assert all(seconds > 0 for seconds in batch.timings.values())


def test_a_tensor_is_gone_after_its_last_reader_and_says_so():
    batch = SyncExecutor({"write": Write(), "read": Read()}).execute(stub_request(), ARGS)
    with pytest.raises(AttributeError, match="after its last declared reader"):
        _ = batch.latents


def test_a_stage_must_return_its_batch():
    class Forgetful(Write):
        def forward(self, batch, server_args):
            batch.latents = torch.ones(1)

    with pytest.raises(PipelineDefinitionError, match="must return the batch"):
        SyncExecutor({"stage": Forgetful()}).execute(stub_request(), ARGS)


def test_check_stages_catches_what_a_stage_did_not_declare():
    class Sly(Write):
        def forward(self, batch, server_args):
            batch.timesteps = torch.ones(1)
            return batch

    SyncExecutor({"stage": Sly()}).execute(stub_request(), ARGS)
    checking = ServerArgs.from_flat(device="cpu", check_stages=True)
    with pytest.raises(PipelineDefinitionError, match=r"writes batch.timesteps"):
        SyncExecutor({"stage": Sly()}).execute(stub_request(), checking)
