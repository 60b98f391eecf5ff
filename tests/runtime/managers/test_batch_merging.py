from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, fields

import pytest

from runtime.managers.stubs import flat_output, parts
from sglang.multimodal_gen.configs.sample.sampling_params import ImageSamplingParams
from sglang.multimodal_gen.configs.task_type import ModelTaskType
from sglang.multimodal_gen.runtime.cache.step_cache import StepCacheUse
from sglang.multimodal_gen.runtime.managers.batch_merging import (
    NOT_COMPARED,
    PER_IMAGE_FIELDS,
    join,
    part_of,
    signature,
)
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req, RequestControl


def sig(**values):
    return signature(parts(**values)[0])


def test_step_caches_must_be_alike():
    on = sig(step_cache="first-block", step_cache_threshold=0.1)
    assert on == sig(step_cache="first-block", step_cache_threshold=0.1, seed=8)
    others = [sig(), sig(step_cache="teacache", step_cache_threshold=0.1),
              sig(step_cache="first-block", step_cache_threshold=0.2)]  # fmt: skip
    assert on not in others


def test_prompts_seeds_negatives_and_counts_may_differ():
    assert sig() == sig(prompt="a hen", seed=9, num_outputs_per_prompt=3)
    guided = {"negative_prompt": "grey", "true_cfg_scale": 3.0}
    assert sig(**guided) == sig(**guided | {"negative_prompt": "red"})


@pytest.mark.parametrize(
    "values",
    [
        {"height": 80},
        {"width": 80},
        {"num_inference_steps": 5},
        {"guidance_scale": 2.0},
        {"true_cfg_scale": 2.0},
        {"max_sequence_length": 9},
        {"lora": ["ink=0.5"]},
        {"negative_prompt": "grey"},
        {"task_type": "t2i", "lora": []},
    ],
)
def test_all_else_separates_requests(values):
    assert sig() != sig(**values)


def test_an_admitted_task_is_compared_and_not_how_it_was_asked_for():
    assert sig() == sig(task_type="t2i")
    one, other = parts()[0], parts()[0]
    other.task_type = ModelTaskType.TI2I
    assert signature(one) != signature(other)


@dataclass
class FamilyParams(ImageSamplingParams):
    shift: float = 1.0
    words: list[str] | None = None
    caption: str | None = field(default=None, metadata={"per_image": True})


def test_a_familys_new_field_is_compared_by_default():
    """A field that nobody thought of here must never be shared by requests that differ in it."""
    one = sig(params_cls=FamilyParams)
    assert one != sig(params_cls=FamilyParams, shift=2.0)
    assert one != sig(params_cls=FamilyParams, words=["a"])
    assert one == sig(params_cls=FamilyParams, caption="mine")
    assert one != sig()  # another family's


def test_a_new_field_of_a_batch_is_compared_by_default():
    compared = {
        f.name for f in fields(Req) if f.init and not f.metadata.get("stage")
    } - PER_IMAGE_FIELDS - NOT_COMPARED  # fmt: skip
    assert compared == {
        "height", "width", "num_inference_steps", "guidance_scale", "true_cfg_scale",
        "do_classifier_free_guidance", "num_frames", "max_sequence_length", "image_path",
        "task_type", "data_type", "fps", "video_path",
    }  # fmt: skip
    for name in compared:
        one, other = parts()[0], parts()[0]
        setattr(other, name, "something else")
        assert signature(one) != signature(other), name


def test_joined_parts_keep_their_own_and_come_apart_again():
    guided = {"negative_prompt": "grey", "true_cfg_scale": 3.0}
    a = parts(prompt=["p", "q"], seed=5, **guided)[0]
    b = parts(prompt="r", seed=9, **guided | {"negative_prompt": "red"}, previews=2)[0]
    control = RequestControl()
    batch, rows = join([a, b], control)
    assert batch.prompt == ["p", "q", "r"]
    assert batch.negative_prompt == ["grey", "grey", "red"]
    assert batch.seeds == [5, 6, 9]
    assert batch.previews == [0, 0, 2]
    assert batch.control is control
    assert batch.request.prompts == ["p", "q", "r"]
    assert (a.seeds, a.warnings, a.previews) == ([5, 6], [], [])
    output = flat_output(batch)
    output = dataclasses.replace(output, step_cache=StepCacheUse(8, (1, 2, 3)))
    first, second = (part_of(output, p, r) for p, r in zip([a, b], rows, strict=True))
    assert (first.step_cache, second.step_cache) == (
        StepCacheUse(8, (1, 2)), StepCacheUse(8, (3,))
    )  # fmt: skip
    assert (first.seeds, second.seeds) == ([5, 6], [9])
    assert [round(v * 255) for v in first.output[:, 0, 0, 0].tolist()] == [5, 6]
    assert [round(v * 255) for v in second.output[:, 0, 0, 0].tolist()] == [9]


def test_nobody_reads_a_warning_about_anothers_prompt():
    a, b = parts(prompt="mine")[0], parts(prompt="yours")[0]
    a.warnings.append("from admission")
    batch, rows = join([a, b], RequestControl())
    batch.warn("prompt cut: 'yours'", [1])
    output = flat_output(batch, ["of all"])
    assert part_of(output, a, rows[0]).warnings == ["from admission", "of all"]
    assert part_of(output, b, rows[1]).warnings == ["prompt cut: 'yours'", "of all"]


def test_a_part_that_ran_joined_can_still_run_alone():
    a, b = parts(seed=5)[0], parts(seed=6)[0]
    joined, _ = join([a, b], RequestControl())
    joined.latents = "written by a stage"
    again, _ = join([a], RequestControl())
    assert again.seeds == [5]
    assert not hasattr(again, "latents")
    assert dataclasses.fields(again)
