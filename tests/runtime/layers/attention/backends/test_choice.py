"""A backend is chosen, or refused with what is missing."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from sglang.multimodal_gen.runtime.layers.attention.backends import choice
from sglang.multimodal_gen.runtime.layers.attention.backends.backend import ByLength
from sglang.multimodal_gen.runtime.layers.attention.backends.choice import (
    Machine,
    check_dtype,
    choose_backend,
)
from sglang.multimodal_gen.runtime.layers.attention.backends.sdpa import SDPA
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

HOPPER, BLACKWELL, ADA, CPU = (
    Machine("cuda", (9, 0)),
    Machine("cuda", (10, 0)),
    Machine("cuda", (8, 9)),
    Machine("cpu"),
)


def attention(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    raise AssertionError("choosing does not compute")


def install(monkeypatch, *names):
    """Exactly these modules can be found."""
    for name in names:
        module = ModuleType(name)
        module.flash_attn_func = module.sageattn = attention
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(choice, "_installed", lambda modules: bool(set(modules) & set(names)))


def test_auto(monkeypatch):
    install(monkeypatch)
    assert choose_backend("auto", CPU) == (SDPA, None)
    backend, note = choose_backend("auto", HOPPER)
    assert backend is SDPA
    assert note == "attention: torch's own choice of kernel"
    install(monkeypatch, "fa3_fwd_interface")
    assert choose_backend("auto", ADA)[0] is SDPA
    assert choose_backend("auto", BLACKWELL)[0] is SDPA
    backend, note = choose_backend("auto", HOPPER, ring=True)
    assert isinstance(backend, ByLength)
    assert (backend.long.name, backend.long.dtypes) == ("fa3", (torch.bfloat16,))
    assert note == "attention: torch's own, FlashAttention 3 from 6144 tokens on"


def test_a_library_that_does_not_load(monkeypatch):
    install(monkeypatch, "fa3_fwd_interface")
    monkeypatch.delattr(sys.modules["fa3_fwd_interface"], "flash_attn_func")
    backend, note = choose_backend("auto", HOPPER)
    assert backend is SDPA
    assert "FlashAttention 3 cannot be used" in note
    with pytest.raises(InvalidArgument, match="fa3_fwd_interface is installed and cannot be used"):
        choose_backend("fa3", HOPPER)


@pytest.mark.parametrize(
    ("wish", "modules", "machine", "name"),
    [
        ("torch_sdpa", (), CPU, "torch_sdpa"),
        ("cudnn_sdpa", (), HOPPER, "torch_cudnn_sdpa"),
        ("torch_flash_sdpa", (), ADA, "torch_flash_sdpa"),
        ("flex", (), ADA, "flex"),
        ("fa3", ("flash_attn_interface",), HOPPER, "fa3"),
        ("fa3_fp8", ("fa3_fwd_interface",), HOPPER, "fa3_fp8"),
        ("fa", ("flash_attn", "flash_attn.cute", "fa3_fwd_interface"), HOPPER, "fa3"),
        ("fa", ("flash_attn", "flash_attn.cute", "fa3_fwd_interface"), BLACKWELL, "fa4"),
        ("fa", ("flash_attn", "flash_attn.cute", "fa3_fwd_interface"), ADA, "fa2"),
        ("sage_attn", ("sageattention",), ADA, "sage_attn"),
    ],
)
def test_a_wish_is_met(monkeypatch, wish, modules, machine, name):
    install(monkeypatch, *modules)
    assert choose_backend(wish, machine)[0].name == name


@pytest.mark.parametrize(
    ("wish", "modules", "machine", "ring", "words"),
    [
        ("fa3", ("fa3_fwd_interface",), CPU, False, "needs a CUDA GPU, and the device is cpu"),
        ("fa3", (), HOPPER, False, r"not installed .*pip install 'sglang-diffusion\[fa3\]'"),
        ("fa3", ("fa3_fwd_interface",), ADA, False, r"9.0 to 9.x, and this GPU has 8.9"),
        ("fa2", ("flash_attn",), Machine("cuda", (7, 5)), False, "8.0 or newer, and this GPU"),
        ("torch_cudnn_sdpa", (), Machine("cuda", (7, 0)), False, "8.0 or newer"),
        ("fa", (), HOPPER, False, "no FlashAttention for this GPU is installed"),
        ("sage_attn", ("sageattention",), ADA, True, "log-sum-exp .* ulysses_degree"),
    ],
)
def test_a_wish_that_cannot_be_met_says_what_is_missing(
    monkeypatch, wish, modules, machine, ring, words
):
    install(monkeypatch, *modules)
    with pytest.raises(InvalidArgument, match=f"attention_backend='{wish}': .*{words}"):
        choose_backend(wish, machine, ring=ring)


def test_a_dtype_is_refused(monkeypatch):
    install(monkeypatch, "fa3_fwd_interface")
    backend, _ = choose_backend("fa3", HOPPER)
    check_dtype(backend, torch.bfloat16, "transformer")
    check_dtype(SDPA, torch.float32, "transformer")
    with pytest.raises(
        InvalidArgument, match="takes bfloat16, and transformer computes in float16"
    ):
        check_dtype(backend, torch.float16, "transformer")
