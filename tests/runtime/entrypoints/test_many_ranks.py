"""The Python door with a model on several ranks."""

from __future__ import annotations

import shutil
import threading

import numpy as np
import pytest

from processes import all_gone
from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.managers.worker_group import WorkerGroup
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import RequestControl
from sglang.multimodal_gen.runtime.utils.errors import (
    CallbackFailed,
    Cancelled,
    InvalidArgument,
    InvalidRequest,
    UserError,
)

from parity.tiny_adapters import diffusers_adapter

SMALL = {"height": 32, "width": 48, "num_inference_steps": 2, "max_sequence_length": 16}
ONE_BY_ONE = {"device": "cpu", "batching_max_size": 1}


@pytest.fixture(scope="module")
def alone(folder):
    with DiffGenerator.from_pretrained(str(folder), **ONE_BY_ONE) as generator:
        yield generator


@pytest.fixture(scope="module")
def copies(folder):
    """Two copies of the model, on a rank each."""
    loading = []
    with DiffGenerator.from_pretrained(
        str(folder), **ONE_BY_ONE, num_gpus=2, dp_size=2, progress=loading.append
    ) as generator:
        generator.loading = loading
        yield generator


@pytest.fixture(scope="module")
def adapter(alone, tmp_path_factory):
    path = tmp_path_factory.mktemp("adapters") / "a.safetensors"
    return str(diffusers_adapter(alone.pipeline.get_module("transformer"), 0).save(path))


def worker_of(generator) -> WorkerGroup:
    worker = generator._worker
    assert isinstance(worker, WorkerGroup)
    return worker


def pictures(generator, **request):
    values = {"prompt": "a fox", "num_outputs_per_prompt": 4, "seed": 5, **SMALL, **request}
    return np.stack([image.array for image in generator.generate(values)])


def test_copies_make_the_same_pictures_in_the_same_order(alone, copies):
    dealt = worker_of(copies).dealt
    dealt.clear()
    events = []
    request = {"prompt": ["a fox", "an owl"], "num_outputs_per_prompt": 2, "seed": 3, **SMALL}
    result = copies.generate(request, progress=events.append)
    expected = alone.generate(request)
    assert sum(dealt.values()) == 4
    assert set(dealt) == {0, 1}
    for image, other in zip(result, expected, strict=True):
        assert (image.prompt, image.seed) == (other.prompt, other.seed)
        assert np.array_equal(image.array, other.array)
    assert len({image.array.tobytes() for image in result}) == 4
    assert list(result.timings) == list(expected.timings)
    denoised = [event for event in events if event.phase == "denoise"]
    assert [event.done for event in denoised] == sorted(event.done for event in denoised)
    assert (denoised[-1].done, denoised[-1].total) == (8, 8)


def test_previews_are_those_of_one_rank(alone, copies):
    """Shown while it runs, by the ranks that have it; a look that raises stops that batch alone."""

    def shown(worker):
        looks = []
        control = RequestControl(preview_listener=looks.append)
        settings = {"prompt": "a fox", "seed": 5, **SMALL, "num_inference_steps": 4}
        params = worker.model.sampling_params(settings)
        (batch,) = worker.model.admit(params, control, previews=2)
        worker.run(batch)
        return looks

    here, there = shown(alone._worker), shown(worker_of(copies))
    assert [(look.image, look.step, look.total) for look in there] == [(0, 1, 4), (0, 2, 4)]
    for one, other in zip(here, there, strict=True):
        assert np.array_equal(one.pixels, other.pixels)
    assert not np.array_equal(there[0].pixels, there[1].pixels)

    def fails(look):
        raise ZeroDivisionError

    worker = worker_of(copies)
    params = worker.model.sampling_params({"prompt": "a fox", **SMALL, "num_inference_steps": 4})
    (batch,) = worker.model.admit(params, RequestControl(preview_listener=fails), previews=2)
    with pytest.raises(CallbackFailed):
        worker.run(batch)
    assert worker.is_alive


def test_loading_is_told_once(copies):
    totals = {event.total for event in copies.loading}
    assert len(totals) == 1
    assert [e.done for e in copies.loading] == sorted(e.done for e in copies.loading)
    assert copies.loading[-1].done == copies.loading[-1].total
    assert copies.notes[-1].startswith("precision")


def test_adapters_go_to_all_copies_and_off_again(alone, copies, adapter):
    base = pictures(copies)
    (receipt,) = copies.set_lora("a", adapter, strength=0.8)
    (ours,) = alone.set_lora("a", adapter, strength=0.8)
    try:
        assert receipt.summary() == ours.summary()
        assert copies.list_loras() == alone.list_loras()
        changed = pictures(copies)
        assert all(np.abs(a.astype(int) - b).max() > 3 for a, b in zip(changed, base, strict=True))
        assert np.array_equal(changed, pictures(alone))
        assert np.array_equal(pictures(copies, lora=[]), base), "for one request alone"
        copies.unmerge_lora_weights()
        assert np.array_equal(pictures(copies), base)
        copies.merge_lora_weights()
        assert np.array_equal(pictures(copies), changed)
    finally:
        copies.unset_lora()
        alone.unset_lora()
    assert np.array_equal(pictures(copies), base)


def test_a_refused_adapter_changes_nothing(copies):
    with pytest.raises(InvalidArgument, match="lora_nickname='nobody'"):
        copies.set_lora("nobody")
    with pytest.raises(InvalidRequest, match="lora='nobody'"):
        copies.generate(prompt="a fox", lora=["nobody"], **SMALL)
    assert len(pictures(copies)) == 4


@pytest.mark.slow
def test_adapters_are_in_force_again_after_a_restart(folder, adapter, tmp_path, caplog):
    with DiffGenerator.from_pretrained(str(folder), **ONE_BY_ONE, num_gpus=2) as generator:
        base = pictures(generator)
        generator.set_lora("a", adapter)
        changed = pictures(generator)
        group = worker_of(generator)
        before = group.pids
        group.restart()
        assert set(group.pids.values()).isdisjoint(before.values())
        assert np.array_equal(pictures(generator), changed)
        # What was set and unset since is no matter; a file that is gone is missed, and told.
        shutil.copy(adapter, tmp_path / "b.safetensors")
        for _ in range(3):
            generator.set_lora("b", str(tmp_path / "b.safetensors"), strength=0.5)
            generator.set_lora("a", strength=1.0)
        (tmp_path / "b.safetensors").unlink()
        with caplog.at_level("WARNING", logger="sglang"):
            group.restart()
        assert "lora 'b' is lost" in caplog.text
        status = group.lora_status()
        assert [each["nickname"] for each in status["loaded_adapters"]] == ["a"]
        assert np.array_equal(pictures(generator), changed)
        generator.unset_lora()
        assert np.array_equal(pictures(generator), base)
        pids = group.pids
    assert all_gone(pids.values(), 0.5)


def test_a_caller_stops_all_copies(copies):
    cancelled = threading.Event()

    def listen(event):
        if event.done >= 3:
            cancelled.set()

    request = SMALL | {"num_inference_steps": 200}
    with pytest.raises(Cancelled):
        copies.generate(
            prompt="a fox",
            num_outputs_per_prompt=2,
            progress=listen,
            cancelled=cancelled,
            **request,
        )
    assert len(pictures(copies)) == 4


def test_a_callbacks_error_comes_back_as_it_is(copies):
    class Mine(Exception):
        pass

    def listen(event):
        raise Mine

    with pytest.raises(Mine):
        copies.generate(prompt="a fox", progress=listen, **SMALL)
    assert len(pictures(copies)) == 4


def test_the_pipeline_is_out_of_reach(copies):
    with pytest.raises(UserError, match=r"in 2 other processes \(num_gpus=2\)"):
        _ = copies.pipeline


def test_a_model_without_a_native_family_takes_one_rank(folder):
    with pytest.raises(InvalidArgument, match="num_gpus=2: a model that runs through Diffusers"):
        DiffGenerator.from_pretrained(str(folder), device="cpu", num_gpus=2, backend="diffusers")
