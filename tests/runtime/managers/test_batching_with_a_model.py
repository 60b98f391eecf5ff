"""Requests that share a batch get the pictures that they would get alone, sooner."""

from __future__ import annotations

import time

import pytest
import torch

from runtime.managers.stubs import Heard
from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.managers.scheduler import Scheduler, SchedulingLimits
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch

VALUES = {"height": 32, "width": 32, "num_inference_steps": 3, "max_sequence_length": 16,
          "true_cfg_scale": 4.0}  # fmt: skip
REQUESTS = [
    {"prompt": "a red fox", "seed": 1, "negative_prompt": "grey"},
    {"prompt": "two hens in the rain at night", "seed": 2, "negative_prompt": ""},
    {"prompt": "a red fox", "seed": 3, "negative_prompt": "a very blurred photograph"},
]


class Kept(Heard):
    """Keeps the pictures themselves."""

    def made(self, output: OutputBatch) -> None:
        self.warnings += output.warnings
        self.pictures = output.output


@pytest.fixture(scope="module")
def worker(folder):
    with DiffGenerator.from_pretrained(str(folder), device="cpu") as generator:
        yield generator._open()


def serve(worker, requests, *, together, steps=3):
    forwards = []
    transformer = worker.pipeline.get_module("transformer")
    hook = transformer.register_forward_pre_hook(lambda *_: forwards.append(1))
    scheduler = Scheduler(worker, SchedulingLimits(together=together))
    heard = []
    for index, values in enumerate(requests):
        heard.append(Kept())
        params = worker.model.sampling_params(VALUES | {"num_inference_steps": steps} | values)
        scheduler.submit(str(index), worker.model.admit(params), heard[-1])
    start = time.perf_counter()
    while scheduler.run_next():
        pass
    seconds = time.perf_counter() - start
    hook.remove()
    assert [h.error for h in heard] == [None] * len(heard)
    return heard, len(forwards), seconds


def difference(a, b):
    return float((a.pictures - b.pictures).abs().max())


def test_a_shared_batch_equals_each_alone(worker):
    """CB-060: at most 2/255; sensitivity first, and a count of forwards as proof."""
    alone, forwards_alone, _ = serve(worker, REQUESTS, together=False)
    assert difference(alone[0], alone[1]) > 3 / 255
    assert difference(alone[0], alone[2]) > 3 / 255
    other = [REQUESTS[0] | {"negative_prompt": "red"}]
    assert difference(alone[0], serve(worker, other, together=False)[0][0]) > 3 / 255
    shared, forwards, _ = serve(worker, REQUESTS, together=True)
    assert (forwards_alone, forwards) == (3 * 3 * 2, 3 * 2)
    for one, same in zip(alone, shared, strict=True):
        assert difference(one, same) <= 2 / 255


def test_a_shared_batch_is_faster(worker):
    requests = [{"prompt": "a fox", "seed": seed, "negative_prompt": ""} for seed in range(4)]
    serve(worker, requests, together=True, steps=8)
    ratios = []
    for _ in range(3):
        alone = serve(worker, requests, together=False, steps=8)[2]
        ratios.append(serve(worker, requests, together=True, steps=8)[2] / alone)
    assert min(ratios) < 0.8


def test_each_hears_of_its_own_cut_prompt_alone(worker):
    long = "word " * 200
    (first, second), forwards, _ = serve(
        worker,
        [{"prompt": long, "negative_prompt": "x"}, {"prompt": "short", "negative_prompt": "x"}],
        together=True,
    )
    assert forwards == 3 * 2
    assert any("cut" in text for text in first.warnings)
    assert second.warnings == []
    assert torch.isfinite(second.pictures).all()
