import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.multimodal_gen.configs.lora_choice import nickname_problem
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.flags import to_argv
from sglang.multimodal_gen.runtime.server_args.parser import FlagParser
from sglang.multimodal_gen.runtime.server_args.server_args import server_flags
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

SNAPSHOT = Path(__file__).with_name("flags.txt")
MAX_FLAGS = 80

words = st.text(min_size=1, max_size=12).filter(
    lambda text: bool(text.strip()) and "\0" not in text and text != "--"
)
components = st.sampled_from(["vae", "text_encoder", "text_encoder_2", "transformer"])
precisions = st.sampled_from(["fp32", "fp16", "bf16"])
server_args = st.fixed_dictionaries(
    {},
    optional={
        "model_path": words,
        "revision": st.none() | words,
        "precision": st.sampled_from(["auto", "config"]) | precisions,
        "component_paths": st.dictionaries(components, words),
        "component_precisions": st.dictionaries(components, precisions),
        "device": st.sampled_from(["auto", "cpu", "cuda"]),
        "num_gpus": st.none() | st.integers(min_value=1),
        "tp_size": st.none() | st.integers(min_value=1),
        "enable_cfg_parallel": st.booleans(),
        "dp_size": st.integers(min_value=1),
        "layerwise_offload_components": st.sampled_from([(), ("all",), ("dit", "vae")]),
        "dit_offload_prefetch_size": st.sampled_from([0.0, 0.25, 3.0]),
        "cpu_offload_components": st.sampled_from([(), ("none",), ("text_encoder_2",)]),
        "vae_cpu_offload": st.none() | st.booleans(),
        "pin_cpu_memory": st.booleans(),
        "use_fsdp_inference": st.booleans(),
        "batching_max_size": st.integers(min_value=1),
        "lora_path": st.none() | words | words.map(lambda path: (path,)),
        "lora_nickname": words.filter(lambda word: nickname_problem(word) is None),
        "lora_scale": st.floats(allow_nan=False, allow_infinity=False),
        "lora_merge_mode": st.sampled_from(["auto", "merge", "dynamic"]),
        "vae_mode": st.sampled_from(["auto", "plain", "tiled", "spatial_shard"]),
        "log_level": st.sampled_from(["debug", "info", "warning", "error"]),
        "check_stages": st.booleans(),
    },
)


def described_flags() -> str:
    lines = [
        f"{spec.spelling} {spec.value.metavar()} [{spec.value.arity}] default={spec.default!r}"
        for spec in server_flags()
    ]
    return "\n".join(lines) + "\n"


def test_a_new_flag_is_an_event():
    """Changed on purpose? Write `described_flags()` to flags.txt, and a line in CHANGELOG.md."""
    assert described_flags() == SNAPSHOT.read_text(encoding="utf-8")
    assert len(server_flags()) <= MAX_FLAGS


def test_every_flag_has_help():
    assert all(spec.help.endswith(".") for spec in server_flags())


def test_flat_names_reach_their_sections():
    args = ServerArgs.from_flat(model_path="x", device="cpu", batching_max_size=2)
    assert args.model.model_path == "x"
    assert args.platform.device == "cpu"
    assert args.batching.batching_max_size == 2
    assert args.observe.log_level == "warning"
    assert args.pipeline_config is None


def test_a_path_object_is_a_model_path(tmp_path):
    assert ServerArgs.from_flat(model_path=tmp_path).model.model_path == str(tmp_path)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(InvalidArgument) as raised:
        ServerArgs.from_flat(batch_max_size=4)
    assert str(raised.value) == (
        "batch_max_size=4: there is no such server argument. Did you mean 'batching_max_size'?"
    )


@settings(deadline=None)
@given(server_args)
def test_flat_values_round_trip(values: dict[str, Any]):
    args = ServerArgs.from_flat(**values)
    assert ServerArgs.from_flat(**args.to_flat()) == args
    assert pickle.loads(pickle.dumps(args)) == args


@settings(deadline=None)
@given(server_args)
def test_arguments_survive_the_way_over_a_command_line(values: dict[str, Any]):
    args = ServerArgs.from_flat(**values)
    parser = FlagParser("sglang test", "A test.")
    parser.add_flags("server", server_flags(), owner="ServerArgs")
    said = parser.parse(to_argv(server_flags(), args.to_flat()))
    assert ServerArgs.from_flat(**parser.values_of(said, server_flags())) == args


def test_arguments_share_no_mutable_default():
    first, second = ServerArgs(), ServerArgs()
    assert first.model.component_paths is not second.model.component_paths
