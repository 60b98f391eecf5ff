"""Step caches from a request to its picture, on one rank."""

from __future__ import annotations

import pytest
import torch

from runtime.pipelines_core.stages.test_step_checkpoints import Sink
from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.managers.finished import settings_of
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.pipelines_core.loop_state import LoopState
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import RequestControl
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, InvalidRequest

STEPS = 6
VALUES = {"prompt": ["a fox", "a hen"], "height": 32, "width": 48, "num_inference_steps": STEPS,
          "max_sequence_length": 16, "seed": 3, "negative_prompt": "grey",
          "true_cfg_scale": 3.0}  # fmt: skip
ON = {"step_cache": "first-block", "step_cache_threshold": 0.75}


@pytest.fixture(scope="module")
def worker(folder):
    with DiffGenerator.from_pretrained(str(folder), device="cpu") as generator:
        yield generator._open()


def run(worker, state=None, sink=None, **values):
    """The output, and how many images' rows went through the last block."""
    rows: list[int] = []
    last = worker.pipeline.get_module("transformer").single_transformer_blocks[-1]
    hook = last.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    control = RequestControl(checkpoints=sink)
    (batch,) = worker.model.admit(worker.model.sampling_params(VALUES | values), control)
    batch.resume_from = state
    output = worker.run(batch)
    hook.remove()
    return output, sum(rows)


def test_off_is_off_nothing_is_reused_at_zero_and_much_at_a_large_threshold(worker):
    plain, rows = run(worker)
    assert (plain.step_cache, rows) == (None, 2 * 2 * STEPS)
    zero, rows = run(worker, **ON | {"step_cache_threshold": 0})
    assert torch.equal(zero.output, plain.output)
    assert zero.step_cache is not None
    assert (zero.step_cache.forwards, zero.step_cache.reused, rows) == (12, (0, 0), 24)
    some, rows = run(worker, **ON)
    most, least = run(worker, **ON | {"step_cache_threshold": 100})
    assert 2 * 2 <= least < rows < 24
    for output, computed in ((some, rows), (most, least)):
        assert output.step_cache is not None
        assert output.step_cache.computed == computed
        assert (output.output - plain.output).abs().max() > 3 / 255
    assert most.step_cache is not None
    assert most.step_cache.reused == (2 * (STEPS - 1),) * 2


def test_nothing_is_carried_over_and_each_image_is_as_it_is_alone(worker):
    both, _ = run(worker, **ON)
    run(worker, **ON | {"prompt": "another", "seed": 9, "width": 32})
    again, _ = run(worker, **ON)
    assert torch.equal(again.output, both.output)
    assert again.step_cache == both.step_cache
    for image, values in enumerate(({"prompt": "a fox"}, {"prompt": "a hen", "seed": 4})):
        alone, _ = run(worker, **ON | values)
        assert alone.step_cache is not None
        assert both.step_cache is not None
        assert alone.step_cache == both.step_cache.rows(image, image + 1)
        assert (alone.output[0] - both.output[image]).abs().max() <= 2 / 255


@pytest.mark.parametrize("method", ["first-block", "teacache"])
def test_a_resumed_loop_goes_on_with_what_was_kept(worker, method):
    threshold = 5.0 if method == "teacache" else 0.75
    values = {"step_cache": method, "step_cache_threshold": threshold}
    plain, _ = run(worker, **values)
    assert plain.step_cache is not None
    assert plain.step_cache.left_out > 0
    sink = Sink()
    run(worker, sink=sink, **values)
    for data in sink.states[1::2]:
        again, rows = run(worker, LoopState.from_bytes(data), **values)
        assert torch.equal(again.output, plain.output)
        assert again.step_cache == plain.step_cache
        assert rows < plain.step_cache.computed
    half = LoopState.from_bytes(sink.states[3]).rows(1, 2)
    alone, _ = run(worker, half, **values | {"prompt": "a hen", "seed": 4})
    assert (alone.output[0] - plain.output[1]).abs().max() <= 2 / 255
    # A state that was kept in another way is not gone on from.
    other, _ = run(worker, LoopState.from_bytes(sink.states[3]))
    assert any("began again" in text for text in other.warnings)
    assert torch.equal(other.output, run(worker)[0].output)


def test_blocks_that_are_left_out_are_not_streamed(worker, folder):
    most = ON | {"step_cache_threshold": 100}
    resident, _ = run(worker, **most)
    flags = {"device": "cpu", "layerwise_offload_components": ["dit"]}
    with DiffGenerator.from_pretrained(str(folder), **flags) as generator:
        streaming = generator._open()
        stream = generator.pipeline.residency.components["transformer"].stream_counters
        output, _ = run(streaming, **most)
        copied = stream.bytes
        assert torch.equal(output.output, resident.output)
        run(streaming)
        assert copied < 0.75 * (stream.bytes - copied)


def test_the_servers_choice_is_what_a_request_leaves_open(folder):
    args = ServerArgs.from_flat(
        model_path=str(folder), device="cpu",
        default_step_cache="first-block", default_step_cache_threshold=0.07,
    )  # fmt: skip
    model = ModelDescription.find(args)

    def asked(**values):
        request = model.admit(model.sampling_params(VALUES | values))[0].request
        return request.step_cache, request.step_cache_threshold

    assert asked() == ("first-block", 0.07)
    assert asked(step_cache="off") == (None, None)
    assert asked(step_cache_threshold=0.5) == ("first-block", 0.5)
    assert asked(step_cache="teacache")[0] == "teacache"
    assert asked(step_cache="teacache")[1] != 0.07
    # What a file carries, and `sglang replay` asks for again.
    (batch,) = model.admit(model.sampling_params(VALUES))
    settings = settings_of(batch.request)
    assert settings["step_cache"] == "first-block"
    assert settings["step_cache_threshold"] == 0.07
    with pytest.raises(InvalidArgument, match="without --default-step-cache"):
        ServerArgs.from_flat(default_step_cache_threshold=0.1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step_cache": "tea"}, "step_cache='tea': must be one of: off, first-block, teacache"),
        ({"step_cache_threshold": 0.1}, "choose step_cache=first-block or teacache"),
        ({"step_cache": "off", "step_cache_threshold": 0.1}, "leave one of them out"),
        ({"step_cache": "first-block", "step_cache_threshold": -1}, "at least 0"),
        ({"step_cache": "first-block", "step_cache_threshold": float("nan")}, "finite"),
        ({"step_cache": "first-block", "step_cache_threshold": True}, "must be a number"),
    ],
)
def test_mistakes_are_told_when_the_request_comes(worker, values, message):
    with pytest.raises(InvalidRequest, match=message):
        worker.model.admit(worker.model.sampling_params(VALUES | values))


def test_a_model_that_cannot_is_refused_by_name_before_it_loads(worker, folder, monkeypatch):
    monkeypatch.delattr("sglang.multimodal_gen.runtime.models.dits.flux.STEP_CACHE")
    with pytest.raises(InvalidRequest, match="FluxTransformer2DModel has no STEP_CACHE"):
        run(worker, **ON)
    args = {"model_path": str(folder), "device": "cpu", "default_step_cache": "first-block"}
    with pytest.raises(InvalidArgument, match="FluxTransformer2DModel has no STEP_CACHE"):
        ModelDescription.find(ServerArgs.from_flat(**args))
    monkeypatch.undo()
    with pytest.raises(InvalidArgument, match="--no-use-fsdp-inference"):
        ModelDescription.find(ServerArgs.from_flat(**args, use_fsdp_inference=True))
    args |= {"default_step_cache": "teacache", "backend": "diffusers"}
    with pytest.raises(InvalidArgument, match="Diffusers runs this model from end to end"):
        ModelDescription.find(ServerArgs.from_flat(**args))
