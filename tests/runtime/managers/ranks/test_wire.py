from __future__ import annotations

import ast
import datetime
import pathlib
import pickle
import sys
import types
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sglang.multimodal_gen.runtime.managers.ranks as ranks
from rank_stubs import ScriptParams, rank_and_sum, script, script_model
from sglang.multimodal_gen.configs.task_type import ModelTaskType
from sglang.multimodal_gen.registry import REGISTRY
from sglang.multimodal_gen.runtime.managers.ranks.channel import Channel, channel_pair
from sglang.multimodal_gen.runtime.managers.ranks.meeting import trusted_packages
from sglang.multimodal_gen.runtime.managers.ranks.pixels import sendable
from sglang.multimodal_gen.runtime.managers.ranks.wire import (
    OWN_PACKAGES,
    DoesNotTravel,
    Reader,
    pack,
    unpack,
    write,
)

HERE = frozenset({"sglang", "rank_stubs", __name__.partition(".")[0]})
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.sampled_from(list(ModelTaskType))
    | st.builds(pathlib.Path, st.just("/a/b"))
)
KEYS = st.text() | st.integers() | st.tuples(st.text(), st.integers())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
    ),
    max_leaves=12,
)


def same(value, packages=HERE):
    return unpack(pack(value), packages)


@given(VALUES)
@settings(max_examples=200, deadline=None)
def test_data_arrives_as_it_was(value):
    arrived = same(value)
    assert arrived == value
    assert type(arrived) is type(value)


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int64", "uint8", "bool", "float8_e4m3fn"]
)
@pytest.mark.parametrize("shape", [(2, 3, 4), (), (0, 5)])
def test_tensors_arrive_bit_equal(dtype, shape):
    kind = getattr(torch, dtype)
    tensor = (torch.rand(shape) * 9).to(kind)
    arrived = same({"x": [tensor]})["x"][0]
    assert (arrived.dtype, arrived.shape) == (kind, tensor.shape)
    bits = torch.uint8
    assert torch.equal(arrived.reshape(-1).view(bits), tensor.reshape(-1).view(bits))


def test_a_part_of_a_tensor_is_sent_without_the_rest():
    whole = torch.rand(100, 8)
    body, buffers = write(whole[:, ::2].T)
    assert sum(map(len, buffers)) == 100 * 4 * 4
    assert torch.equal(Reader().read(body, [bytearray(b) for b in buffers]), whole[:, ::2].T)


def test_arrays_and_their_scalars():
    for array in (np.arange(6, dtype=">i2").reshape(2, 3), np.array("text"), np.float64(0.1)):
        arrived = same(array)
        assert type(arrived) is type(array)
        assert arrived.dtype == array.dtype
        assert np.array_equal(arrived, array)
    with pytest.raises(DoesNotTravel, match="array of object"):
        pack(np.array([print]))


@dataclass(frozen=True, slots=True)
class Frozen:
    a: int
    b: list[int] = field(init=False)


def test_records_keep_empty_slots_and_are_not_made_anew():
    arrived = same(Frozen(3))
    assert arrived.a == 3
    with pytest.raises(AttributeError):
        _ = arrived.b
    assert same((torch.bfloat16, torch.device("cuda", 1))) == (
        torch.bfloat16,
        torch.device("cuda:1"),
    )
    assert same(Counter("aab")) == Counter("aab")
    assert same(types.MappingProxyType({"a": 1}))["a"] == 1
    assert same((rank_and_sum, ScriptParams)) == (rank_and_sum, ScriptParams)


def test_a_sealed_request_stays_sealed():
    batch = script(script_model(), "a fox")[0]
    batch.request.seal()
    arrived = same(sendable(batch))
    assert arrived.request == batch.request
    assert arrived.request._sealed


OWN_FAMILIES = [  # other tests may have registered theirs
    known
    for known in REGISTRY.known_models()
    if known.pipeline_config.__module__.startswith("sglang.")
]


@pytest.mark.parametrize("known", OWN_FAMILIES, ids=lambda known: known.pipelines[0])
def test_every_familys_settings_and_config_travel(known):
    config = known.pipeline_config()
    assert same(config, OWN_PACKAGES) == config
    assert same(known.sampling_params, OWN_PACKAGES) is known.sampling_params


def test_a_model_travels_whole():
    model = script_model(num_gpus=2)
    packages = trusted_packages(model)
    assert packages == {"sglang", "rank_stubs"}
    assert same(model, packages) == model


@pytest.mark.parametrize(
    "value",
    [print, lambda: 1, datetime.datetime.now, object(), sys, open(__file__), ValueError("x")],  # noqa: SIM115
    ids=str,
)
def test_what_is_neither_data_nor_named_is_refused_by_the_sender(value):
    with pytest.raises(DoesNotTravel):
        pack([value])
    if hasattr(value, "close"):
        value.close()


# What a stranger may send.


def raw(node) -> bytes:
    return msgspec.msgpack.encode((msgspec.msgpack.encode(node), []))


@pytest.mark.parametrize(
    "node",
    [
        ["name", "os:system"],
        ["name", "subprocess:run"],
        ["name", "builtins:eval"],
        ["record", "subprocess:CompletedProcess", "args", "x"],
        # Of a package that is trusted, but not its own.
        ["name", "sglang.multimodal_gen.runtime.managers.ranks.spawn:subprocess.run"],
        ["name", "sglang.multimodal_gen.runtime.managers.ranks.spawn:os.system"],
        ["name", "sglang.multimodal_gen.runtime.managers.ranks.spawn:RankProcess.start"],
        ["name", "sglang.nowhere:x"],
        ["name", ""],
        ["enum", "sglang.multimodal_gen.runtime.utils.errors:UserError", "x"],
        ["record", "sglang.multimodal_gen.runtime.utils.errors:UserError", "x", 1],
        ["record", "sglang.multimodal_gen.runtime.managers.ranks.messages:Stop", "nothing", 1],
        ["record", "sglang.multimodal_gen.runtime.managers.ranks.messages:Stop", "failure"],
        ["unknown", 1],
        ["array", "O", 1],
        ["array", "<f4", 3],
        ["tensor", "load", 3],
        ["tensor", "float32", 3],
        ["device", "x:y"],
        ["dict", "odd"],
        ["set", ["list"]],
        [],
        [["list"]],
    ],
    ids=str,
)
def test_bytes_of_a_stranger_run_nothing(node):
    with pytest.raises(DoesNotTravel):
        unpack(raw(node))


class Canary:
    def __reduce__(self):
        return (pytest.fail, ("a pickle ran",))


def test_a_pickle_is_not_read():
    for data in (pickle.dumps(Canary()), pickle.dumps(1), b"", b"\xc1", b"\x91" * 100_000):
        with pytest.raises(DoesNotTravel):
            unpack(data)
    ours, other = channel_pair()
    theirs = Channel(other)
    ours._connection.send_bytes(pickle.dumps(Canary()))
    with pytest.raises(OSError, match="does not speak as a rank does"):
        theirs.receive()
    for channel in (ours, theirs):
        channel.close()


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_noise_is_refused_in_one_way(data):
    for read in (lambda: unpack(data), lambda: Reader().read(data, [])):
        try:
            read()
        except DoesNotTravel:
            continue


def test_no_module_between_ranks_knows_pickle():
    files = list(pathlib.Path(ranks.__file__).parent.glob("*.py"))
    assert len(files) > 10
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
                assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & set(names), file
