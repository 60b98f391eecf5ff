"""Diffusers' own offload, which knows all components or none, behind this runtime's flags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diffusers.utils import is_accelerate_available

from sglang.multimodal_gen.runtime.loader.model_source import ModelSource
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.memory_args import MemoryArgs
from sglang.multimodal_gen.runtime.utils.component_roles import role_of
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

EXTRA = "diffusers"
"""The extra that has what Diffusers needs for adapters and offload."""
_GROUPS = {"dit": ("transformer", "unet", "prior", "decoder")} | {
    name: (name,) for name in ("text_encoder", "image_encoder", "vae")
}
_WHOLE = ("all", "default")
_REFUSED = ("layerwise_offload_components", "dit_offload_prefetch_size",
            "dit_layerwise_resident_layers", "pin_cpu_memory", "use_fsdp_inference")  # fmt: skip


def check_memory(server_args: ServerArgs, source: ModelSource, found: type[Any]) -> None:
    """Refuse memory flags that Diffusers cannot honour on this device with this pipeline.

    Raises:
        InvalidArgument: names the flag, and what can be had.
    """
    args = server_args.memory
    plain = MemoryArgs()
    for field in _REFUSED:
        if (value := getattr(args, field)) != getattr(plain, field):
            problem = (
                "the Diffusers backend offloads whole components, all or none: use "
                "--cpu-offload-components all, or leave this out"
            )
            raise InvalidArgument(field, value, problem)
    _check_names(args, source)
    moved, kept = next(_moved(args), None), next(_kept(args), None)
    if moved is None:
        return
    if kept is not None:
        problem = (
            f"Diffusers offloads all components or none, and {moved[0]}={moved[1]!r} asks for it; "
            "leave one of them out"
        )
        raise InvalidArgument(*kept, problem)
    if server_args.platform.device == "cpu":
        problem = "offload needs an accelerator to bring components to, and the device is the CPU"
        raise InvalidArgument(*moved, f"{problem}; leave it out")
    if not getattr(found, "model_cpu_offload_seq", None):
        problem = f"{found.__name__} declares no order of its components (model_cpu_offload_seq)"
        raise InvalidArgument(*moved, f"{problem}, so Diffusers cannot offload it; leave it out")
    if not is_accelerate_available():
        problem = f"needs the package accelerate: pip install 'sglang-diffusion[{EXTRA}]'"
        raise InvalidArgument(*moved, problem)


def place(pipeline: Any, server_args: ServerArgs) -> None:
    """Put a loaded pipeline on the device, or in host memory where offload is asked for."""
    device = server_args.platform.device
    if next(_moved(server_args.memory), None) is None:
        pipeline.to(device)
    else:
        pipeline.enable_model_cpu_offload(device=device)


def offload_note(server_args: ServerArgs) -> str | None:
    """A sentence where components are offloaded, for people."""
    moved = next(_moved(server_args.memory), None)
    if moved is None:
        return None
    return (
        f"memory: {moved[0]} asks for offload, and Diffusers does it for all components: each "
        "comes to the device for its turn and leaves after it"
    )


def _moved(args: MemoryArgs) -> Iterator[tuple[str, object]]:
    """The flags that ask for a component to be offloaded."""
    if any(name != "none" for name in args.cpu_offload_components):
        yield "cpu_offload_components", args.cpu_offload_components
    for group in _GROUPS:
        if getattr(args, f"{group}_cpu_offload") is True:
            yield f"{group}_cpu_offload", True


def _kept(args: MemoryArgs) -> Iterator[tuple[str, object]]:
    """The flags that ask for a component to stay on the device."""
    if "none" in args.cpu_offload_components:
        yield "cpu_offload_components", args.cpu_offload_components
    for group in _GROUPS:
        if getattr(args, f"{group}_cpu_offload") is False:
            yield f"{group}_cpu_offload", False


def _check_names(args: MemoryArgs, source: ModelSource) -> None:
    roles = {role_of(name) for name in source.components}
    groups = [group for group, names in _GROUPS.items() if roles & set(names)]
    known = [*source.components, *(group for group in groups if group not in source.components)]
    there = f"It has: {', '.join(known)}"
    for name in args.cpu_offload_components:
        if name not in (*known, *_WHOLE, "none"):
            problem = f"this checkpoint has no such component.{did_you_mean(name, known)} {there}"
            raise InvalidArgument("cpu_offload_components", name, problem)
    for group in _GROUPS:
        if (value := getattr(args, f"{group}_cpu_offload")) is not None and group not in groups:
            problem = f"this checkpoint has no component of the kind {group!r}. {there}"
            raise InvalidArgument(f"{group}_cpu_offload", value, problem)
