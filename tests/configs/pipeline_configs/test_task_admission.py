"""The admission table: every combination of declaration, wish, output and inputs, drawn at random.

The oracle below states the porters' rules sentence by sentence, from a table of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
from sglang.multimodal_gen.configs.sample.sampling_params import ImageSamplingParams
from sglang.multimodal_gen.configs.task_type import DataType, ModelTaskType
from sglang.multimodal_gen.runtime.managers.admission import admit
from sglang.multimodal_gen.runtime.utils.errors import (
    InvalidArgument,
    InvalidRequest,
    PipelineDefinitionError,
)

# name: output, image input, video input (no / may / must)
TABLE = {
    "T2I": ("IMAGE", "no", "no"),
    "I2I": ("IMAGE", "must", "no"),
    "TI2I": ("IMAGE", "may", "no"),
    "T2V": ("VIDEO", "no", "no"),
    "I2V": ("VIDEO", "must", "no"),
    "TI2V": ("VIDEO", "may", "no"),
    "V2V": ("VIDEO", "no", "must"),
    "F2V": ("VIDEO", "no", "must"),
    "I2M": ("MESH", "must", "no"),
    "VLA_ACTION": ("ACTION", "may", "no"),
}
ALLOWED = {"no": (False,), "may": (False, True), "must": (True,)}
TASKS = tuple(ModelTaskType)


def config_of(tasks, default, *, declared):
    @dataclass
    class Config(PipelineConfig):
        supported_task_types = tuple(tasks) if declared else None

    return Config(task_type=default)


def takes(task, image, video):
    _, images, videos = TABLE[task.name]
    return image in ALLOWED[images] and video in ALLOWED[videos]


def expected(tasks, default, declared, wish, output, image, video):
    """The task, or None for a refusal."""

    def fits(task):
        if declared:
            return takes(task, image, video)
        # "Legacy singleton pipelines retain their model-owned video checks."
        return takes(task, image, video) or (
            TABLE[task.name][2] == "no" and takes(task, image, False)
        )

    if wish is not None:
        # "Explicit tasks must belong to the supported set and match the endpoint's output type."
        served = wish in tasks and output in (None, TABLE[wish.name][0])
        return wish if served and fits(wish) else None
    # "Filters by output type and conditioning inputs ..."
    fitting = [t for t in tasks if output in (None, TABLE[t.name][0]) and fits(t)]
    # "... prefers a compatible default ..."
    if default in fitting:
        return default
    # "Python/CLI requests also prefer the default's output type among alternatives."
    if output is None:
        alike = [t for t in fitting if TABLE[t.name][0] == TABLE[default.name][0]]
        fitting = alike or fitting
    # "... then selects a unique compatible alternative. Ambiguous requests must specify."
    return fitting[0] if len(fitting) == 1 else None


@st.composite
def cases(draw):
    tasks = draw(st.lists(st.sampled_from(TASKS), min_size=1, unique=True))
    declared = draw(st.booleans())
    if not declared:
        tasks = tasks[:1]
    return {
        "tasks": tasks,
        "default": draw(st.sampled_from(tasks)),
        "declared": declared,
        "wish": draw(st.none() | st.sampled_from(TASKS)),
        "output": draw(st.none() | st.sampled_from([t.name for t in DataType])),
        "image": draw(st.booleans()),
        "video": draw(st.booleans()),
    }


def resolved(config, wish, output, image, video):
    try:
        return config.resolve_task_type(
            wish,
            data_type=None if output is None else DataType[output],
            has_image=image,
            has_video=video,
        )
    except InvalidRequest:
        return None


@given(cases(), st.randoms(use_true_random=False))
@settings(max_examples=600, deadline=None)
def test_admission_follows_the_contract_and_declaration_order_never_decides(case, random):
    config = config_of(case["tasks"], case["default"], declared=case["declared"]).seal()
    asked = (case["wish"], case["output"], case["image"], case["video"])
    task = resolved(config, *asked)
    assert task is expected(**case)
    assert config.task_type is case["default"]
    if case["wish"] is not None:  # names in any case are the same wish
        named = random.choice((str.lower, str.title, str.upper))(case["wish"].name)
        assert resolved(config, f" {named} ", *asked[1:]) is task
    shuffled = random.sample(case["tasks"], len(case["tasks"]))
    other = config_of(shuffled, case["default"], declared=case["declared"])
    assert resolved(other, *asked) is task
    if task is not None:
        assert task in case["tasks"]
        assert case["output"] in (None, task.data_type().name)


@given(st.lists(st.sampled_from(TASKS), max_size=4), st.sampled_from(TASKS))
@settings(max_examples=200, deadline=None)
def test_a_declaration_is_nonempty_unique_and_includes_the_default(tasks, default):
    config = config_of(tasks, default, declared=True)
    sound = bool(tasks) and len(set(tasks)) == len(tasks) and default in tasks
    if sound:
        assert config.get_supported_task_types() == tuple(tasks)
        return
    for ask in (config.get_supported_task_types, config.resolve_task_type):
        with pytest.raises(PipelineDefinitionError, match="nonempty, unique, and include"):
            ask()


def test_an_override_keeps_the_three_rules_too_and_counts_as_a_declaration():
    @dataclass
    class ByCheckpoint(PipelineConfig):
        tasks: tuple[ModelTaskType, ...] = (ModelTaskType.T2I, ModelTaskType.V2V)

        def get_supported_task_types(self):
            return self.tasks

    assert ByCheckpoint().resolve_task_type(has_video=True) is ModelTaskType.V2V
    with pytest.raises(InvalidRequest, match="takes no input video"):
        ByCheckpoint().resolve_task_type("T2I", has_video=True)
    with pytest.raises(PipelineDefinitionError, match="nonempty, unique, and include"):
        ByCheckpoint(tasks=(ModelTaskType.V2V,)).resolve_task_type()


@pytest.mark.parametrize("task", TASKS)
def test_the_predicates_of_a_task_are_the_table(task):
    output, images, videos = TABLE[task.name]
    assert task.data_type().name == output
    assert task.requires_image_input is (images == "must")
    assert task.accepts_image_input is (images != "no")
    assert task.requires_video_input is (videos == "must")
    assert task.accepts_video_input is (videos != "no")
    assert task.is_image_gen is (output == "IMAGE")
    assert task.is_video_gen is (output == "VIDEO")
    assert task.is_visual_gen is (output in ("IMAGE", "VIDEO"))
    assert task.is_mesh_gen is (output == "MESH")
    assert task.is_action_gen is (output == "ACTION")


def test_the_default_is_set_by_the_operator_and_a_request_for_another_leaves_it():
    config = config_of(TASKS, ModelTaskType.T2V, declared=True)
    for value in (ModelTaskType.I2V, "i2v", " I2V "):
        assert config.with_settings({"task_type": value}).task_type is ModelTaskType.I2V
    with pytest.raises(InvalidArgument, match="T2X"):
        config.with_settings({"task_type": "T2X"})
    config.seal()
    assert config.resolve_task_type("I2I", has_image=True) is ModelTaskType.I2I
    assert config.resolve_task_type() is ModelTaskType.T2V


@dataclass
class WithVideo(ImageSamplingParams):
    height: int | None = 64
    width: int | None = 64
    video_path: str | list[str] | None = None


def test_a_family_that_declares_video_path_has_it_admitted_by_task():
    config = config_of((ModelTaskType.T2V, ModelTaskType.F2V), ModelTaskType.T2V, declared=True)

    def task(**values):
        (batch,) = admit(WithVideo(prompt="a", **values), config, batching_max_size=1)
        assert batch.data_type is DataType.VIDEO
        assert batch.request.task_type is batch.task_type
        return batch.task_type.name

    assert task() == "T2V"
    assert task(video_path="a.mp4") == "F2V"
    assert task(video_path=["a.mp4"], task_type="f2v") == "F2V"
    for values, message in (
        ({"task_type": "F2V"}, "video_path=None: task F2V needs an input video"),
        ({"task_type": "T2V", "video_path": "a.mp4"}, "task T2V takes no input video"),
        (
            {"video_path": "a.mp4", "image_path": "a.png"},
            r"image_path=\['a.png'\]: no task takes an input image here; this pipeline serves",
        ),
    ):
        with pytest.raises(InvalidRequest, match=message):
            task(**values)
