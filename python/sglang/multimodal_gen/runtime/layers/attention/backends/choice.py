"""Which attention backend a denoiser gets: chosen once, when its pipeline is built."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.nn.attention import SDPBackend

from sglang.multimodal_gen.runtime.layers.attention.backends.backend import (
    AttentionBackend,
    ByLength,
)
from sglang.multimodal_gen.runtime.layers.attention.backends.libraries import (
    HALF,
    flash_backend,
    flash_fp8_backend,
    sage_backend,
)
from sglang.multimodal_gen.runtime.layers.attention.backends.sdpa import SDPA, TorchSDPA
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

LONG, LONG_WIDTHS = 6144, (128,)
"""From how many tokens on, and for which heads, FlashAttention 3 is taken where it is installed.
Measured on one H200: 523 TFLOP/s to cuDNN's 555 to 576 at 24 x 4,608 x 128, 625 to 564 at 7,017,
679 to 591 at 32,760; the crossing lies between the first two."""

_AMPERE, _HOPPER, _BLACKWELL = (8, 0), (9, 0), (10, 0)
_ALIASES = {"cudnn_sdpa": "torch_cudnn_sdpa"}
_OLDER = "flash_attn_interface"


@dataclass(frozen=True, slots=True)
class Machine:
    """Where attention runs: kind of device, and a GPU's compute capability."""

    device: str
    capability: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class _Library:
    """A kernel of a package: modules that may have it, in order, and the GPUs it is for."""

    modules: tuple[str, ...]
    function: str
    build: Callable[[str, Callable[..., Any], str], AttentionBackend]
    since: tuple[int, int]
    until: tuple[int, int]
    install: str


def _flash(name: str, function: Callable[..., Any], module: str) -> AttentionBackend:
    # The wheel leaves out what is not needed for inference here, the 16-bit floats among it.
    dtypes = (torch.bfloat16,) if module == "fa3_fwd_interface" else HALF
    return flash_backend(name, function, dtypes)


_FA3 = ("fa3_fwd_interface", _OLDER)
_LIBRARIES: Mapping[str, _Library] = {
    "fa2": _Library(
        ("flash_attn",), "flash_attn_func", _flash, _AMPERE, (99, 0), "pip install flash-attn"
    ),
    "fa3": _Library(
        _FA3, "flash_attn_func", _flash, _HOPPER, _BLACKWELL, "pip install 'sglang-diffusion[fa3]'"
    ),
    "fa3_fp8": _Library(
        _FA3, "flash_attn_func", lambda name, function, _: flash_fp8_backend(name, function),
        _HOPPER, _BLACKWELL, "pip install 'sglang-diffusion[fa3]'",
    ),
    "fa4": _Library(
        ("flash_attn.cute",), "flash_attn_func", _flash, _HOPPER, (99, 0),
        "pip install flash-attn-4",
    ),
    "sage_attn": _Library(
        ("sageattention",), "sageattn", lambda name, function, _: sage_backend(name, function),
        _AMPERE, (99, 0), "pip install sageattention",
    ),
}  # fmt: skip
_KERNELS = {
    "torch_cudnn_sdpa": SDPBackend.CUDNN_ATTENTION,
    "torch_flash_sdpa": SDPBackend.FLASH_ATTENTION,
}


def choose_backend(
    wish: str, machine: Machine, *, ring: bool = False
) -> tuple[AttentionBackend, str | None]:
    """The backend, and the sentence about it where it was chosen for the user.

    Args:
        wish: as ``--attention-backend`` has it.
        ring: parts of attention will be merged.

    Raises:
        InvalidArgument: it cannot be on this machine, or in a ring; the message says what is
            missing.
    """
    name = _ALIASES.get(wish, wish)
    if name == "auto":
        return _automatic(machine)
    if name == "torch_sdpa":
        return SDPA, None
    if machine.device != "cuda":
        raise InvalidArgument(
            "attention_backend",
            wish,
            f"needs a CUDA GPU, and the device is {machine.device}. Leave it out",
        )
    note = None
    if name == "fa":
        name = _newest_flash(wish, machine)
        note = f"attention: {name}, the newest FlashAttention that is installed for this GPU"
    if name in _KERNELS:
        _check_capability(wish, machine, _AMPERE, (99, 0))
        return TorchSDPA(name, _KERNELS[name], HALF), None
    backend = _flex() if name == "flex" else _from_library(wish, name, machine)
    if ring and not backend.gives_lse:
        raise InvalidArgument(
            "attention_backend",
            wish,
            "does not tell the log-sum-exp by which the parts of ring attention are merged. Use "
            "ulysses_degree in place of ring_degree, or torch_sdpa",
        )
    return backend, note


def backend_to_plan(wish: str, machine: Machine) -> AttentionBackend:
    """What a wish comes to on a GPU that is not here, to be asked about and not to be run.

    Packages are not looked for: they would be installed there.

    Raises:
        InvalidArgument: it is not for such a GPU.
    """
    name = _ALIASES.get(wish, wish)
    if name in _KERNELS:
        return choose_backend(wish, machine)[0]
    if name == "flex":
        return _flex()
    library = _LIBRARIES.get("fa2" if name == "fa" else name)
    if library is None:
        return SDPA
    _check_capability(wish, machine, library.since, library.until)
    return library.build(wish, _not_here, library.modules[-1])


def check_dtype(backend: AttentionBackend, dtype: torch.dtype, component: str) -> None:
    """Refuse a backend for a denoiser whose tensors it does not take.

    Raises:
        InvalidArgument: it does not.
    """
    if backend.dtypes and dtype not in backend.dtypes:
        kinds = " and ".join(str(kind).removeprefix("torch.") for kind in backend.dtypes)
        found = str(dtype).removeprefix("torch.")
        problem = f"takes {kinds}, and {component} computes in {found}. Use --precision bf16"
        raise InvalidArgument("attention_backend", backend.name, problem)


def _automatic(machine: Machine) -> tuple[AttentionBackend, str | None]:
    if machine.device != "cuda":
        return SDPA, None
    library = _LIBRARIES["fa3"]
    capable = machine.capability and library.since <= machine.capability < library.until
    if capable and _installed(library.modules):
        try:
            long = _from_library("auto", "fa3", machine)
        except InvalidArgument as error:
            return SDPA, f"attention: torch's own; FlashAttention 3 cannot be used ({error})"
        note = f"attention: torch's own, FlashAttention 3 from {LONG} tokens on"
        return ByLength("auto", SDPA, long, LONG, LONG_WIDTHS), note
    return SDPA, "attention: torch's own choice of kernel"


def _not_here(*args: object, **kwargs: object) -> NoReturn:
    raise RuntimeError("a backend that was planned is called")


def _flex() -> AttentionBackend:
    # Its import brings half a compiler.
    from sglang.multimodal_gen.runtime.layers.attention.backends.flex import FlexAttention

    return FlexAttention()


def _newest_flash(wish: str, machine: Machine) -> str:
    """The newest version that suits the GPU and is installed."""
    order = ("fa4", "fa3", "fa2") if (machine.capability or (0, 0)) >= _BLACKWELL else (
        "fa3", "fa4", "fa2",
    )  # fmt: skip
    for name in order:
        library = _LIBRARIES[name]
        suits = machine.capability and library.since <= machine.capability < library.until
        if suits and _installed(library.modules):
            return name
    problem = (
        "no FlashAttention for this GPU is installed: pip install 'sglang-diffusion[fa3]' on "
        "Hopper, flash-attn-4 on newer GPUs, flash-attn on older ones"
    )
    raise InvalidArgument("attention_backend", wish, problem)


def _from_library(wish: str, name: str, machine: Machine) -> AttentionBackend:
    library = _LIBRARIES[name]
    _check_capability(wish, machine, library.since, library.until)
    module = next((module for module in library.modules if _installed((module,))), None)
    if module is None:
        missing = " and ".join(library.modules)
        problem = f"needs a package that is not installed ({missing}): {library.install}"
        raise InvalidArgument("attention_backend", wish, problem)
    try:
        function = getattr(importlib.import_module(module), library.function)
    except (ImportError, OSError, AttributeError) as error:
        problem = f"{module} is installed and cannot be used ({error}): {library.install}"
        raise InvalidArgument("attention_backend", wish, problem) from error
    return library.build(name, function, module)


def _check_capability(
    wish: str, machine: Machine, since: tuple[int, int], until: tuple[int, int]
) -> None:
    found = machine.capability
    if found is None or not since <= found < until:
        have = "none is known" if found is None else f"this GPU has {found[0]}.{found[1]}"
        range_ = f"{since[0]}.{since[1]}" + (" to 9.x" if until == _BLACKWELL else " or newer")
        problem = f"is for GPUs of compute capability {range_}, and {have}. Leave it out"
        raise InvalidArgument("attention_backend", wish, problem)


def _installed(modules: tuple[str, ...]) -> bool:
    """Whether one of the modules can be found; nothing is imported but its parents."""
    for module in modules:
        try:
            if importlib.util.find_spec(module) is not None:
                return True
        except (ImportError, ValueError):
            continue
    return False
