from __future__ import annotations

import logging
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.configs.lora_choice import LoRAChoice
from sglang.multimodal_gen.runtime.cache.compiled_blocks import CompiledBlocks
from sglang.multimodal_gen.runtime.layers.lora.adapted_module import AdaptedModule
from sglang.multimodal_gen.runtime.utils.errors import (
    CheckpointError,
    InvalidArgument,
    InvalidRequest,
)

from parity.tiny_adapters import Adapter
from parity.tiny_checkpoints import flux_dev

LINEARS = ("transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_v", "proj_out")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "flux"
    flux_dev().write(path)
    with DiffGenerator.from_pretrained(str(path), device="cpu", precision="bf16") as generator:
        yield generator.pipeline


@pytest.fixture(autouse=True)
def _unloaded(pipeline):
    yield
    for adapter in pipeline.get_lora_status()["loaded_adapters"]:
        pipeline.unload_lora_adapter(adapter["nickname"])
    assert not pipeline.is_lora_set()


@pytest.fixture(scope="module")
def files(pipeline, tmp_path_factory):
    """Two adapters that share one linear: name -> (path, adapter)."""
    folder, made = tmp_path_factory.mktemp("adapters"), {}
    for seed, (name, paths) in enumerate({"a": LINEARS[:2], "b": LINEARS[1:]}.items()):
        adapter = Adapter(pipeline.get_module("transformer"), seed)
        for path in paths:
            adapter.add((path,), f"transformer.{path}", rank=2 + seed)
        made[name] = (str(adapter.save(folder / f"{name}.safetensors")), adapter)
    return made


class Probe:
    """What the linears of the transformer compute, beside what they should."""

    def __init__(self, pipeline, files):
        self.linears = {path: pipeline.get_module("transformer").get_submodule(path)
                        for path in LINEARS}  # fmt: skip
        self.base = {path: linear.weight.clone() for path, linear in self.linears.items()}
        self.files = files

    def check(self, weights, mode):
        for path, linear in self.linears.items():
            change = sum(
                (weight * self.files[name][1].changes[path] for name, weight in weights.items()
                 if path in self.files[name][1].changes and weight),
                torch.zeros(()),
            )  # fmt: skip
            changed = bool(change.any())
            base = self.base[path]
            if not changed or mode == "live":
                assert torch.equal(linear.weight, base)
            assert bool(linear._forward_hooks) == (changed and mode == "live")
            if changed and mode == "merged":
                torch.testing.assert_close(linear.weight, (base.float() + change).bfloat16())
            x = torch.eye(linear.in_features, dtype=torch.bfloat16)
            got = linear(x).float() - nn.functional.linear(x, base, linear.bias).float()
            limit = 0.03 * (base.abs().max() + change.abs().max() + 1)
            assert (got.T - change).abs().max() <= limit
            assert changed == bool(got.any())


CALLS = st.one_of(
    st.tuples(st.just("load"), st.sampled_from("ab")),
    st.tuples(st.just("unload"), st.sampled_from("ab")),
    st.tuples(
        st.just("set"),
        st.lists(
            st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, 0.5, 1.0, -1.0])),
            min_size=1,
            max_size=3,
        ),
        st.sampled_from(["merge", "dynamic"]),
    ),
    st.tuples(st.just("merge"), st.sampled_from([1.0, 0.5, 0.0])),
    st.tuples(st.sampled_from(["unmerge", "deactivate", "unset"])),
    st.tuples(st.just("request"), st.sampled_from(["", "a", "b", "ab"])),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(CALLS, max_size=12))
def test_after_any_walk_the_model_is_that_of_the_active_set(pipeline, files, calls):
    _unload_all(pipeline)
    probe = Probe(pipeline, files)
    loaded, chosen, factor, mode = set(), {}, 1.0, "off"
    for name, *rest in calls:
        if name == "load":
            pipeline.load_lora_adapter(files[rest[0]][0], rest[0])
            loaded.add(rest[0])
        elif name == "unload" and rest[0] in loaded:
            pipeline.unload_lora_adapter(rest[0])
            loaded.discard(rest[0])
            chosen = {key: value for key, value in chosen.items() if key != rest[0]}
        elif name == "set":
            names, weights = [n for n, _ in rest[0]], [w for _, w in rest[0]]
            pipeline.set_lora(names, [files[n][0] for n in names], strength=weights,
                              merge_mode=rest[1])  # fmt: skip
            loaded |= set(names)
            chosen = {n: sum(w for m, w in rest[0] if m == n) for n in names}
            factor, mode = 1.0, "merged" if rest[1] == "merge" else "live"
        elif name == "merge" and chosen:
            pipeline.merge_lora_weights(strength=rest[0])
            factor, mode = rest[0], "merged"
        elif name == "unmerge":
            pipeline.unmerge_lora_weights()
            mode = "off" if mode == "merged" else mode
        elif name == "deactivate":
            pipeline.deactivate_lora_weights()
            mode = "off"
        elif name == "unset":
            pipeline.unset_lora()
            chosen, mode = {}, "off"
        elif name == "request" and set(rest[0]) <= loaded:
            with pipeline.request_adapters([LoRAChoice(n, False, 0.7) for n in rest[0]]):
                probe.check(dict.fromkeys(rest[0], 0.7), "live")
        active = {} if mode == "off" else {n: w * factor for n, w in chosen.items()}
        probe.check(active, mode)
        assert pipeline.is_lora_set() == bool(chosen)
        assert pipeline.is_lora_effective() == any(active.values())
    _unload_all(pipeline)
    probe.check({}, "off")


def _unload_all(pipeline):
    for adapter in pipeline.get_lora_status()["loaded_adapters"]:
        pipeline.unload_lora_adapter(adapter["nickname"])


def test_the_receipt_says_what_was_done(pipeline, files, caplog):
    path, adapter = files["a"]
    with caplog.at_level(logging.INFO, "sglang"):
        receipt = pipeline.load_lora_adapter(path, "a")
    assert (receipt.nickname, receipt.path, receipt.format) == ("a", path, "diffusers")
    assert (receipt.ranks, receipt.alpha_source, receipt.scaling) == ((2,), "none", {1.0: 2})
    assert receipt.modules == {"transformer": LINEARS[:2]}
    assert receipt.matched == tuple(sorted(adapter.tensors))
    assert receipt.unmatched == receipt.unsupported == ()
    assert 0.05 < receipt.relative_change["transformer"] < 5
    assert receipt.summary() in caplog.messages
    assert "2 linears of transformer change by" in receipt.summary()
    with pytest.raises(AttributeError):
        receipt.nickname = "b"


def test_what_is_not_applied_is_a_warning(pipeline, tmp_path, caplog):
    adapter = Adapter(pipeline.get_module("transformer"), 1)
    adapter.add(LINEARS[:1], "transformer." + LINEARS[0])
    adapter.tensors["text_encoder_3.x.lora_A.weight"] = torch.ones(2, 2)
    adapter.tensors["transformer.proj_out.lora_B.bias"] = torch.ones(2)
    receipt = pipeline.load_lora_adapter(str(adapter.save(tmp_path / "x.safetensors")), "x")
    assert receipt.unmatched == ("text_encoder_3.x.lora_A.weight",)
    assert receipt.unsupported == ("transformer.proj_out.lora_B.bias",)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "name no module of this pipeline: text_encoder_3.x" in caplog.text


def test_no_match_names_both_sides(pipeline, tmp_path):
    adapter = Adapter(nn.ModuleDict({"foreign": nn.Linear(3, 3)}), 1)
    adapter.add(("foreign",), "transformer.foreign")
    with pytest.raises(CheckpointError, match=r"(?s)foreign.lora_A.*transformer\.proj_out"):
        pipeline.load_lora_adapter(str(adapter.save(tmp_path / "x.safetensors")), "x")
    assert pipeline.get_lora_status() == {"loaded_adapters": [], "active": {}}


def test_a_name_belongs_to_one_file(pipeline, files, tmp_path):
    copy = files["a"][1].save(tmp_path / "a.safetensors")
    first = pipeline.load_lora_adapter(str(copy), "a")
    assert pipeline.load_lora_adapter(str(copy.parent), "a") is first
    with pytest.raises(InvalidArgument, match="is another file"):
        pipeline.load_lora_adapter(files["b"][0], "a")
    files["b"][1].save(copy)
    with pytest.raises(InvalidArgument, match="is an older version"):
        pipeline.set_lora("a", str(copy))
    pipeline.unload_lora_adapter("a")
    assert pipeline.load_lora_adapter(str(copy), "a").modules["transformer"] == tuple(
        sorted(LINEARS[1:])
    )


def test_two_threads_may_load_one_name(pipeline, files):
    receipts, barrier = [], threading.Barrier(2)

    def load():
        barrier.wait()
        receipts.append(pipeline.load_lora_adapter(files["a"][0], "a"))

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert receipts[0] is receipts[1]


def test_nobody_changes_adapters_while_a_request_runs(pipeline, files):
    probe = Probe(pipeline, files)
    done = threading.Event()

    def change():
        pipeline.set_lora("b", files["b"][0])
        done.set()

    pipeline.load_lora_adapter(files["a"][0], "a")
    for choices in ([LoRAChoice("a", False)], None):
        thread = threading.Thread(target=change)
        with pipeline.request_adapters(choices):
            thread.start()
            assert not done.wait(0.2)
            probe.check({"a": 1.0} if choices else {}, "live")
        thread.join()
        probe.check({"b": 1.0}, "merged")
        pipeline.unset_lora()
        done.clear()


def test_auto_runs_live_what_rounding_would_take(pipeline, files):
    pipeline.set_lora("a", files["a"][0])
    assert pipeline.get_lora_status()["active"]["transformer"][0]["merged"]
    pipeline.set_lora("a", strength=1e-4)
    (entry,) = pipeline.get_lora_status()["active"]["transformer"]
    assert entry["nickname"] == "a"
    assert entry["strength"] == 1e-4
    assert not entry["merged"]


def test_a_failed_request_gives_back_what_was_in_force(pipeline, files):
    probe = Probe(pipeline, files)
    pipeline.set_lora("a", files["a"][0], merge_mode="merge")
    pipeline.load_lora_adapter(files["b"][0], "b")
    with pytest.raises(ZeroDivisionError), pipeline.request_adapters([LoRAChoice("b", False)]):
        raise ZeroDivisionError
    probe.check({"a": 1.0}, "merged")
    with pytest.raises(InvalidRequest, match="Did you mean 'b'"), \
            pipeline.request_adapters([LoRAChoice("bb", False)]):  # fmt: skip
        pass
    probe.check({"a": 1.0}, "merged")


BAD = {
    "unknown": ({"lora_nickname": "aa"}, "Did you mean 'a'"),
    "blank": ({"lora_nickname": " ", "lora_path": "x"}, "not blank"),
    "target": ({"lora_nickname": "a", "target": "transfomer"}, "Did you mean 'transformer'"),
    "other target": ({"lora_nickname": "a", "target": "text_encoder"}, "changes transformer only"),
    "strengths": ({"lora_nickname": ["a", "a"], "strength": [1.0]}, "has 1 entries for 2"),
    "paths": ({"lora_nickname": ["a", "c"], "lora_path": "x"}, "is one path for 2"),
    "number": ({"lora_nickname": "a", "strength": float("nan")}, "finite"),
    "text": ({"lora_nickname": "a", "strength": "1"}, "finite"),
    "mode": ({"lora_nickname": "a", "merge_mode": "fuse"}, "choose one of"),
    "no name": ({"lora_nickname": None}, "must be text, or a list of texts"),
    "number as name": ({"lora_nickname": 5}, "must be text, or a list of texts"),
    "numbers as names": ({"lora_nickname": ["a", 5]}, "must be text, or a list of texts"),
    "no target": ({"lora_nickname": "a", "target": None}, "must be text, or a list of texts"),
    "number as path": ({"lora_nickname": "b", "lora_path": 5}, "must be a path"),
    "weight in the name": ({"lora_nickname": "x=1", "lora_path": "x"}, "could not choose it"),
    "path as name": ({"lora_nickname": "x/y", "lora_path": "x"}, "could not choose it"),
    "file as name": ({"lora_nickname": "x.safetensors", "lora_path": "x"}, "could not choose it"),
    "paths of none": ({"lora_nickname": [], "lora_path": ["x"]}, "has 1 entries for 0"),
    "contradiction": (
        {"lora_nickname": "a", "merge_mode": "dynamic", "merge_weights": True},
        "contradicts",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_arguments_that_make_no_sense_change_nothing(pipeline, files, case):
    arguments, problem = BAD[case]
    probe = Probe(pipeline, files)
    pipeline.set_lora("a", files["a"][0], merge_mode="merge")
    with pytest.raises(InvalidArgument, match=problem):
        pipeline.set_lora(**arguments)
    probe.check({"a": 1.0}, "merged")


def test_what_set_lora_loaded_goes_when_a_later_check_fails(pipeline, files):
    probe = Probe(pipeline, files)
    pipeline.set_lora("a", files["a"][0], merge_mode="merge")
    with pytest.raises(InvalidArgument, match="changes transformer only"):
        pipeline.set_lora(["a", "b"], [None, files["b"][0]], target=["all", "text_encoder"])
    with pytest.raises(CheckpointError):
        pipeline.set_lora(["b", "c"], [files["b"][0], "/nowhere.safetensors"])
    assert [a["nickname"] for a in pipeline.get_lora_status()["loaded_adapters"]] == ["a"]
    probe.check({"a": 1.0}, "merged")


def test_what_was_in_force_comes_back_when_an_adapter_cannot_be(pipeline, files, monkeypatch):
    probe = Probe(pipeline, files)
    pipeline.set_lora("a", files["a"][0], merge_mode="merge")
    merge, calls = AdaptedModule.merge, []

    def fails_once(self, terms):
        calls.append(terms)
        if len(calls) == 1:
            raise MemoryError
        return merge(self, terms)

    monkeypatch.setattr(AdaptedModule, "merge", fails_once)
    with pytest.raises(MemoryError):
        pipeline.set_lora("b", files["b"][0], merge_mode="merge")
    assert [a["nickname"] for a in pipeline.get_lora_status()["loaded_adapters"]] == ["a"]
    probe.check({"a": 1.0}, "merged")


def test_no_name_at_all_is_the_base(pipeline, files):
    probe = Probe(pipeline, files)
    pipeline.set_lora("a", files["a"][0], merge_mode="merge")
    probe.check({"a": 1.0}, "merged")
    assert pipeline.set_lora([]) == ()
    probe.check({}, "off")
    assert not pipeline.is_lora_set()


def test_targets_of_the_other_verbs_are_checked(pipeline):
    for target in (None, 5, ["transformer", 5]):
        with pytest.raises(InvalidArgument, match="must be text, or a list"):
            pipeline.unset_lora(target)


NOTHING = {
    "empty": (lambda a, b: {}, "holds no tensors"),
    "no factor": (
        lambda a, b: {LINEARS[0] + ".diff": a},
        r"none of its 1 tensors is a LoRA factor",
    ),
    "half": (lambda a, b: {LINEARS[0] + ".lora_A.weight": a}, r"lora_A.weight' has no lora_B"),
    "B is zero": (
        lambda a, b: {LINEARS[0] + ".lora_A.weight": a, LINEARS[0] + ".lora_B.weight": 0 * b},
        "never trained",
    ),
    "alpha is zero": (
        lambda a, b: {
            LINEARS[0] + ".lora_A.weight": a,
            LINEARS[0] + ".lora_B.weight": b,
            LINEARS[0] + ".alpha": torch.tensor(0.0),
        },
        r"its alpha is 0 \(from alpha keys\)",
    ),
}


@pytest.mark.parametrize("case", NOTHING)
def test_a_file_that_changes_nothing_is_an_error_with_the_true_reason(pipeline, tmp_path, case):
    make, reason = NOTHING[case]
    linear = pipeline.get_module("transformer").get_submodule(LINEARS[0])
    tensors = make(torch.ones(2, linear.in_features), torch.ones(linear.out_features, 2))
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=reason) as caught:
        pipeline.set_lora("x", str(tmp_path / "x.safetensors"))
    assert "another model" not in str(caught.value)
    assert pipeline.get_lora_status() == {"loaded_adapters": [], "active": {}}


def test_compiled_blocks_stand_aside_for_live_adapters_and_stay_for_merged_ones(pipeline, files):
    pipeline.compiled = compiled = CompiledBlocks(backend="eager")
    compiled.add(pipeline.get_module("transformer"))
    counters, whole = compiled.counters, compiled.counters.blocks
    try:
        pipeline.set_lora("a", files["a"][0], merge_mode="dynamic")
        assert (counters.blocks, counters.direct) == (whole - 1, 1)
        pipeline.set_lora("a", files["a"][0], merge_mode="merge")
        assert (counters.blocks, counters.direct) == (whole, 0)
        pipeline.unset_lora()
        with pipeline.request_adapters([LoRAChoice("a", False, 0.7)]):
            assert (counters.blocks, counters.direct) == (whole - 1, 1)
        assert (counters.blocks, counters.direct) == (whole, 0)
    finally:
        compiled.close()
        pipeline.compiled = None
