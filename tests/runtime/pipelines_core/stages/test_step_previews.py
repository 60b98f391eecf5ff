from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.managers.finished import pixels_of
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import RequestControl
from sglang.multimodal_gen.runtime.pipelines_core.stages.step_previews import expected_latents
from sglang.multimodal_gen.runtime.utils.errors import CallbackFailed
from sglang.multimodal_gen.runtime.utils.progress import preview_steps

VALUES = {"prompt": ["a fox", "a hen"], "height": 32, "width": 48, "num_inference_steps": 6,
          "max_sequence_length": 16, "seed": 3}  # fmt: skip


@pytest.fixture(scope="module")
def worker(folder):
    with DiffGenerator.from_pretrained(str(folder), device="cpu") as generator:
        yield generator._open()


def run(worker, previews, listener=None):
    params = worker.model.sampling_params(VALUES)
    control = RequestControl(preview_listener=listener)
    (batch,) = worker.model.admit(params, control, previews=previews)
    return batch, worker.run(batch)


def test_previews_are_due_evenly_and_never_at_the_end():
    assert preview_steps(20, 3) == {5, 10, 15}
    assert preview_steps(28, 1) == {14}
    assert preview_steps(4, 0) == frozenset()
    assert preview_steps(1, 3) == frozenset()
    assert preview_steps(2, 3) == {1}
    for total in range(1, 12):
        assert all(0 < step < total for step in preview_steps(total, 3))


def test_previews_show_the_picture_coming_and_change_nothing(worker):
    shown = []
    _, plain = run(worker, 0, shown.append)
    assert shown == []
    _, output = run(worker, 2, shown.append)
    assert torch.equal(output.output, plain.output)
    assert [(p.image, p.step, p.total) for p in shown] == [(0, 2, 6), (1, 2, 6), (0, 4, 6),
                                                           (1, 4, 6)]  # fmt: skip
    final = pixels_of(output.output)
    for preview in shown:
        assert preview.pixels.shape == (32, 48, 3)
        assert preview.pixels.dtype == np.uint8

    def distance(preview):
        return np.abs(preview.pixels.astype(int) - final[preview.image]).mean()

    early, late = shown[0], shown[2]
    assert distance(early) > distance(late) > 0  # real: on its way to this picture
    mixed = np.abs(late.pixels.astype(int) - final[1]).mean()
    assert mixed > distance(late)  # and to no other's


def test_only_the_images_that_somebody_wants_to_see_are_decoded(worker):
    decoded = []
    vae = worker.pipeline.get_module("vae")
    hook = vae.decoder.register_forward_hook(lambda *_: decoded.append(1))
    params = worker.model.sampling_params(VALUES)
    shown = []
    (batch,) = worker.model.admit(params, RequestControl(preview_listener=shown.append))
    batch.previews = [0, 3]
    worker.run(batch)
    hook.remove()
    assert {p.image for p in shown} == {1}
    assert len(decoded) == 3 + 2


def test_a_failing_listener_is_told_apart_from_our_faults(worker):
    def fail(preview):
        raise KeyError("theirs")

    with pytest.raises(CallbackFailed, match="theirs"):
        run(worker, 1, fail)


def test_the_estimate_is_exact_for_a_straight_flow(worker):
    """x = (1 - sigma) x0 + sigma noise has velocity noise - x0: x0 = x - sigma v."""
    batch, _ = run(worker, 0)
    clean, noise = torch.randn(2, 1, 4, 4).unbind(0)
    for step, sigma in enumerate([1.0, 0.6, 0.1]):
        batch.sigmas = [1.0, 0.6, 0.1]
        batch.scheduler = worker.pipeline.get_module("scheduler")
        noisy = (1 - sigma) * clean + sigma * noise
        assert torch.allclose(expected_latents(batch, step, noisy, noise - clean), clean, atol=1e-6)
    batch.scheduler = object()  # another kind of schedule: the latents as they are
    assert expected_latents(batch, 0, clean, noise) is clean
