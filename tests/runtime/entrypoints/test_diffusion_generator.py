from __future__ import annotations

import threading

import numpy as np
import pytest
from PIL import Image

import sglang.multimodal_gen
from sglang.multimodal_gen import DiffGenerator, GenerationResult
from sglang.multimodal_gen.runtime.utils.errors import (
    Cancelled,
    InvalidArgument,
    InvalidRequest,
    ModelNotFound,
    UserError,
)

SMALL = {"height": 32, "width": 48, "num_inference_steps": 2, "max_sequence_length": 16}


@pytest.fixture(scope="module")
def generator(folder):
    with DiffGenerator.from_pretrained(str(folder), device="cpu") as generator:
        yield generator


def test_the_package_exports_the_generator():
    assert sglang.multimodal_gen.DiffGenerator is DiffGenerator
    with pytest.raises(AttributeError, match="DiffGenerater"):
        _ = sglang.multimodal_gen.DiffGenerater  # pyright: ignore[reportAttributeAccessIssue]


def test_a_result_holds_pictures_seeds_times_and_memory(generator):
    result = generator.generate(
        prompt=["a fox", "an owl"], num_outputs_per_prompt=2, seed=3, **SMALL
    )
    assert isinstance(result, GenerationResult)
    assert len(result) == 4
    assert [image.seed for image in result] == [3, 4, 5, 6]
    assert [image.prompt for image in result] == ["a fox", "a fox", "an owl", "an owl"]
    for image in result:
        assert image.array.shape == (32, 48, 3)
        assert image.array.dtype == np.uint8
        assert isinstance(image.image, Image.Image)
        assert image.image.size == (48, 32)
    assert len({image.array.tobytes() for image in result}) == 4
    assert list(result.timings)[-2:] == ["denoising_stage", "decoding_stage"]
    assert result.load_seconds > 0
    assert result.peak_memory_mb > 0
    assert result.parameters["num_inference_steps"] == 2


def test_each_picture_can_be_made_again_alone_by_its_seed(generator):
    together = generator.generate(prompt="a fox", num_outputs_per_prompt=3, seed=3, **SMALL)
    for image in together:
        alone = generator.generate(prompt="a fox", seed=image.seed, **SMALL)
        difference = image.array.astype(int) - alone[0].array.astype(int)
        assert abs(difference).max() <= 1


def test_a_picture_does_not_depend_on_how_the_call_is_cut_into_batches(folder):
    prompts = ["a fox", "an owl", "a cat", "red", "blue"]
    pictures = []
    for size in (1, 2, 5):
        with DiffGenerator.from_pretrained(
            str(folder), device="cpu", batching_max_size=size
        ) as generator:
            calls = []
            generator.pipeline.get_module("transformer").register_forward_pre_hook(
                lambda module, args, kwargs, calls=calls: calls.append(
                    len(kwargs["hidden_states"])
                ),
                with_kwargs=True,
            )
            result = generator.generate(prompt=prompts, seed=1, **SMALL)
            assert max(calls) == size
            pictures.append(np.stack([image.array for image in result]).astype(int))
    assert abs(pictures[0] - pictures[1]).max() <= 2
    assert abs(pictures[0] - pictures[2]).max() <= 2


def test_without_a_seed_two_calls_differ_and_tell_their_seeds(generator):
    first, second = (generator.generate(prompt="a fox", **SMALL)[0] for _ in range(2))
    assert first.seed != second.seed
    again = generator.generate(prompt="a fox", seed=first.seed, **SMALL)[0]
    assert (again.array == first.array).all()


def test_progress_rises_to_its_total_over_all_batches(folder):
    loading, running = [], []
    with DiffGenerator.from_pretrained(
        str(folder), device="cpu", batching_max_size=2, progress=loading.append
    ) as generator:
        generator.generate(prompt=list("abc"), progress=running.append, **SMALL)
    for events in (
        loading,
        [e for e in running if e.phase == "denoise"],
        [e for e in running if e.phase == "decode"],
    ):
        counts = [event.done for event in events]
        assert counts == sorted(counts)
        assert {event.total for event in events} == {events[-1].total}
        assert counts[-1] == events[-1].total
    assert {event.phase for event in loading} == {"load"}


def test_raising_from_the_callback_stops_the_work_and_harms_nothing(generator):
    steps = []

    class Enough(Exception):
        pass

    def stop(event):
        steps.append(event)
        if event.phase == "denoise" and event.done == 1:
            raise Enough

    with pytest.raises(Enough):
        generator.generate(prompt="a fox", progress=stop, **SMALL)
    assert not [event for event in steps if event.phase == "decode"]
    assert len(generator.generate(prompt="a fox", **SMALL)) == 1


def test_one_process_and_no_new_threads_or_sockets(generator, monkeypatch):
    import socket
    import subprocess

    def refuse(*args, **kwargs):
        raise AssertionError("a generator needs neither sockets nor processes")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = threading.active_count()
    generator.generate(prompt="a fox", **SMALL)
    assert threading.active_count() == before


def test_settings_may_come_as_a_mapping(generator):
    result = generator.generate({"prompt": "a fox", "seed": 1, **SMALL}, seed=2)
    assert result[0].seed == 2


def test_save_writes_into_a_folder_or_one_file(generator, tmp_path):
    result = generator.generate(prompt="a fox", seed=1, num_outputs_per_prompt=2, **SMALL)
    paths = result.save(tmp_path / "new" / "folder")
    assert len(set(paths)) == 2
    for path, image in zip(paths, result, strict=True):
        with Image.open(path) as saved:
            assert (np.asarray(saved) == image.array).all()
            assert saved.text["prompt"] == "a fox"
            assert saved.text["seed"] == str(image.seed)
    assert len({*result.save(tmp_path / "new" / "folder"), *paths}) == 4
    with pytest.raises(UserError):
        result.save(tmp_path / "one.png")
    single = generator.generate(prompt="a fox", seed=1, **SMALL)
    assert single.save(tmp_path / "one.png", metadata=False) == [tmp_path / "one.png"]
    with Image.open(tmp_path / "one.png") as saved:
        assert not saved.text


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model_path": "no/such/folder/here"}, ModelNotFound, "no/such/folder/here"),
        ({"tp_sizee": 2}, InvalidArgument, "tp_sizee"),
        ({"batching_max_sise": 2}, InvalidArgument, "Did you mean 'batching_max_size'"),
        ({"component_precisions": {"vea": "fp32"}}, InvalidArgument, "Did you mean 'vae'"),
    ],
)
def test_bad_arguments_are_refused(folder, arguments, error, message):
    with pytest.raises(error, match=message):
        DiffGenerator.from_pretrained(**{"model_path": str(folder), "device": "cpu", **arguments})


def test_bad_requests_are_refused_and_the_next_one_works(generator):
    for values, message in [
        ({"prompt": "a", "height": 33}, "multiple of 16"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "num_inference_steps": 0}, "num_inference_steps"),
        ({"prompt": "a", "guidance_scal": 1}, "Did you mean 'guidance_scale'"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            generator.generate(**(SMALL | values))
    assert len(generator.generate(prompt="a fox", **SMALL)) == 1


def test_a_closed_generator_says_so(folder):
    generator = DiffGenerator.from_pretrained(str(folder), device="cpu")
    generator.close()
    generator.close()
    with pytest.raises(UserError, match="closed"):
        generator.generate(prompt="a")


def test_a_long_prompt_is_told_and_the_picture_made(generator):
    result = generator.generate(prompt="fox " * 200, **SMALL)
    assert any("prompt cut" in warning for warning in result.warnings)


def test_cancelling_from_another_thread_stops_within_a_step(generator):
    stop, steps = threading.Event(), []

    def listener(event):
        steps.append(event)
        if event.phase == "denoise" and event.done == 1:
            stop.set()

    with pytest.raises(Cancelled):
        generator.generate(prompt="a fox", progress=listener, cancelled=stop, **SMALL)
    assert steps[-1].done == 1
    assert len(generator.generate(prompt="a fox", **SMALL)) == 1


def test_results_compare_by_identity_and_print_without_pixels(generator):
    result = generator.generate(prompt="a fox", seed=1, **SMALL)
    again = generator.generate(prompt="a fox", seed=1, **SMALL)
    assert result != again
    assert result[0] in result
    assert again[0] not in result
    assert len(repr(result)) < 2000


def test_a_path_of_an_unwritten_format_is_refused(generator, tmp_path):
    result = generator.generate(prompt="a fox", seed=1, **SMALL)
    with pytest.raises(UserError, match=r"\.gif"):
        result.save(tmp_path / "x.gif")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "named", "message"),
    [
        (("a red circle",), {}, r"generate\(prompt=...\)"),
        ((["a"],), {}, r"generate\(prompt=...\)"),
        (({3: "x"},), {}, "must map field names"),
        ((), {"prompt": "x", "progress": 3}, "progress=3"),
        ((), {"prompt": "x", "cancelled": True}, "threading.Event"),
        ((), {"prompt": "x", "guidance_scale": 10**400}, "guidance_scale"),
    ],
)
def test_calls_that_cannot_be_meant_are_refused_in_words(generator, arguments, named, message):
    with pytest.raises(UserError, match=message):
        generator.generate(*arguments, **named)


def test_batches_come_one_by_one_and_all_is_checked_before_the_first(folder):
    with DiffGenerator.from_pretrained(str(folder), device="cpu", batching_max_size=1) as generator:
        parts = generator.generate_batches(prompt=["a", "b"], seed=4, **SMALL)
        assert [image.seed for image in next(parts)] == [4]
        assert [image.seed for image in next(parts)] == [5]
        with pytest.raises(InvalidRequest, match="height"):
            generator.generate_batches(prompt=["a", "b"], **(SMALL | {"height": 33}))


@pytest.mark.parametrize("path", [3, None, "", "s3://bucket/x.png"])
def test_a_place_that_is_no_path_is_refused(generator, path):
    with pytest.raises(UserError, match="output path"):
        generator.generate(prompt="a fox", seed=1, **SMALL).save(path)
