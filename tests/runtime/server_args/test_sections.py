import dataclasses

import pytest

from sglang.multimodal_gen.runtime.server_args.sections import (
    BatchingArgs,
    ModelArgs,
    ObserveArgs,
    PlatformArgs,
)
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (ModelArgs, {"model_path": ""}, "model_path='': must not be blank"),
        (ModelArgs, {"model_path": " "}, "model_path=' ': must not be blank"),
        (ModelArgs, {"model_path": "a\0b"}, r"model_path='a\x00b': holds a NUL character"),
        (ModelArgs, {"model_path": 3}, "model_path=3: must be text, not int"),
        (ModelArgs, {"revision": ""}, "revision='': must not be blank"),
        (ModelArgs, {"precision": "fp8"}, "precision='fp8': choose one of auto, config, fp32"),
        (ModelArgs, {"component_paths": {"vae": " "}}, "component_paths.vae=' ': must not be"),
        (ModelArgs, {"component_paths": ["vae"]}, "component_paths=['vae']: must map names"),
        (
            ModelArgs,
            {"component_precisions": {"vae": "bf61"}},
            "component_precisions={'vae': 'bf61'}: vae: choose one of fp32, fp16, bf16. Did you "
            "mean 'bf16'?",
        ),
        (PlatformArgs, {"device": "gpu"}, "device='gpu': choose one of auto, cpu, cuda."),
        (PlatformArgs, {"device": None}, "device=None: must be text"),
        (BatchingArgs, {"batching_max_size": 0}, "batching_max_size=0: must be at least 1"),
        (BatchingArgs, {"batching_max_size": -1}, "batching_max_size=-1: must be at least 1"),
        (BatchingArgs, {"batching_max_size": 1.0}, "batching_max_size=1.0: must be a whole"),
        (BatchingArgs, {"batching_max_size": True}, "batching_max_size=True: must be a whole"),
        (ObserveArgs, {"log_level": "loud"}, "log_level='loud': choose one of debug, info"),
        (ObserveArgs, {"check_stages": "yes"}, "check_stages='yes': must be true or false"),
    ],
)
def test_a_bad_value_is_refused_with_its_field(section, values, message):
    with pytest.raises(InvalidArgument) as raised:
        section(**values)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("section", [ModelArgs, PlatformArgs, BatchingArgs, ObserveArgs])
def test_sections_are_frozen_slotted_and_keyword_only(section):
    record = section()
    first = dataclasses.fields(section)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, first, getattr(record, first))
    with pytest.raises(TypeError):
        section("positional")
    assert not hasattr(record, "__dict__")


def test_choices_are_taken_in_any_case_and_kept_in_their_own():
    said = ModelArgs(precision="FP16", component_precisions={"vae": "BF16"}, backend="Diffusers")
    assert (said.precision, said.backend) == ("fp16", "diffusers")
    assert said.component_precisions == {"vae": "bf16"}
    assert PlatformArgs(device="CPU").device == "cpu"
