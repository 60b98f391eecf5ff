"""What is known of components' memory before they load: the facts that the plan is made from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    ComponentSpec,
    NeuralComponentLoader,
)
from sglang.multimodal_gen.runtime.loader.key_match import rename_by_table
from sglang.multimodal_gen.runtime.loader.quantize import loaded_bytes
from sglang.multimodal_gen.runtime.loader.safetensors_header import StoredTensor
from sglang.multimodal_gen.runtime.loader.stored_fp8 import sort_stored
from sglang.multimodal_gen.runtime.memory.layerwise import (
    LayerwiseOffloadableModuleMixin,
    streamed_blocks,
    streams,
)
from sglang.multimodal_gen.runtime.memory.plan import (
    ComponentFacts,
    Residency,
    ResidencyPlan,
    plan_residency,
)
from sglang.multimodal_gen.runtime.memory.wishes import wishes_of
from sglang.multimodal_gen.runtime.platforms.memory import MemoryFacts
from sglang.multimodal_gen.runtime.server_args.memory_args import MemoryArgs
from sglang.multimodal_gen.runtime.server_args.parallel_args import ParallelArgs
from sglang.multimodal_gen.runtime.utils.component_roles import is_denoiser, role_of
from sglang.multimodal_gen.runtime.utils.environ import launched_rank
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument
from sglang.multimodal_gen.runtime.utils.precision import parse_precision

_INTEGERS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")


def plan_components(
    facts: Sequence[ComponentFacts],
    ready: Sequence[ComponentFacts],
    names: Collection[str],
    args: MemoryArgs,
    memory: MemoryFacts,
    parallel: ParallelState,
) -> ResidencyPlan:
    """The plan for one pipeline's components: those to load, and those that are ``ready``, which
    are planned only where a flag names them. ``names`` are all components, for messages;
    ``memory`` is this rank's share (`share_of`).

    Raises:
        InvalidArgument: a memory flag cannot be honoured for these components and ranks.
        OutOfMemory: they fit in no way.
    """
    everything = [*facts, *ready]
    known = {component.name for component in everything}
    wishes = wishes_of(args, everything, [name for name in names if name not in known])
    sharded: frozenset[str] = frozenset()
    if args.use_fsdp_inference:
        check_sharding(args, facts, ready, parallel)
        sharded = frozenset(component.name for component in facts if component.group == "dit")
        facts = [_shared_by(component, parallel.sp.size) for component in facts]
    leaving = {n for n, mode in wishes.modes.items() if mode is not Residency.RESIDENT}
    moved = [component for component in ready if component.name in leaving]
    planned = {component.name for component in (*facts, *moved)}
    modes = {name: mode for name, mode in wishes.modes.items() if name in planned}
    plan = plan_residency(
        [*facts, *moved],
        memory,
        replace(wishes, modes=modes),
        device=parallel.device.type,
    )
    return replace(plan, sharded=sharded)


def component_facts(
    spec: ComponentSpec, loader: NeuralComponentLoader, role: str
) -> ComponentFacts:
    """One component's size by the headers of its files, in the precision it will have.

    Float32 islands are not counted as such. Where a table (``TP_PLAN``) deals the weights over
    ranks, a rank is taken to hold its share and a 64th: what tables leave whole.
    """
    cls = loader.model_class(spec)
    dtype = parse_precision(spec.precision, field=f"component_precisions.{spec.name}")
    rename = rename_by_table(getattr(cls, "checkpoint_names", None) or {}, cls.__name__)
    stored = sort_stored(spec.checkpoint, spec.name)
    names = {rename(name): tensor for name, tensor in stored.weights.tensors.items()}
    sizes = {name: _loaded_bytes(tensor, dtype) for name, tensor in names.items()}
    if spec.is_denoiser:
        sizes |= loaded_bytes(cls, names, spec.quantization, stored)
    blocks = _block_bytes(sizes, getattr(cls, "layer_names", ())) if streams(cls) else ()
    group, ways = _group(cls, role, spec.is_denoiser), loader.ways(cls, spec)

    def share(nbytes: int) -> int:
        return nbytes if ways == 1 else -(-nbytes // ways) + nbytes // 64

    return ComponentFacts(
        spec.name, group, share(sum(sizes.values())), tuple(map(share, blocks)), streams(cls)
    )


def module_facts(name: str, module: nn.Module) -> ComponentFacts:
    """The same of a module that is there already."""
    cls = type(module)
    nbytes = sum(parameter.nbytes for parameter in module.parameters())
    blocks: tuple[int, ...] = ()
    if streams(cls):
        blocks = tuple(
            sum(parameter.nbytes for parameter in block.parameters())
            for block in streamed_blocks(module).values()
        )
    return ComponentFacts(
        name, _group(cls, role_of(name), is_denoiser(name)), nbytes, blocks, streams(cls)
    )


def check_sharding(
    args: MemoryArgs,
    components: Sequence[ComponentFacts],
    ready: Sequence[ComponentFacts],
    parallel: ParallelState,
) -> None:
    """Refuse ``use_fsdp_inference`` where it cannot be."""
    field, wish = "use_fsdp_inference", args.use_fsdp_inference
    if parallel.tp.size > 1:
        problem = f"tensor parallelism ({parallel.tp.size} ranks) splits these weights already"
        raise InvalidArgument(field, wish, f"{problem}. Use one of the two")
    if parallel.sp.size == 1:
        problem = "one rank alone has nobody to share the weights with; use --sp-degree 2 or more"
        raise InvalidArgument(field, wish, problem)
    for component in ready:
        if component.group == "dit":
            problem = (
                f"{component.name} was handed in ready: only one that is loaded can be sharded"
            )
            raise InvalidArgument(field, wish, problem)
    for component in components:
        if component.group == "dit" and not component.streams:
            problem = f"{component.name} cannot be sharded: its class lists no blocks (layer_names)"
            raise InvalidArgument(field, wish, problem)


def _group(cls: type, role: str, is_dit: bool) -> str:
    if issubclass(cls, LayerwiseOffloadableModuleMixin):
        is_dit = cls.layerwise_offload_dit_group_enabled
    return "dit" if is_dit else role


def _loaded_bytes(stored: StoredTensor, dtype: torch.dtype) -> int:
    if stored.dtype in _INTEGERS:
        return stored.nbytes
    return torch.Size(stored.shape).numel() * dtype.itemsize


def _block_bytes(sizes: Mapping[str, int], layer_names: Sequence[str]) -> tuple[int, ...]:
    """Bytes of each block, list by list. Stored names may have one wrapper more than the module."""
    blocks: list[int] = []
    for layer_name in layer_names:
        pattern = re.compile(rf"(?:^|\.){re.escape(layer_name)}\.(\d+)\.")
        found: Counter[int] = Counter()
        for name, size in sizes.items():
            if match := pattern.search(name):
                found[int(match[1])] += size
        blocks += [found[index] for index in sorted(found)]
    return tuple(blocks)


def _shared_by(component: ComponentFacts, ranks: int) -> ComponentFacts:
    """A sharded denoiser: a part of it, and the two blocks that are whole at a time."""
    if component.group != "dit":
        return component
    gathered = 2 * max(component.blocks, default=0)
    outside = component.nbytes - sum(component.blocks)
    nbytes = -(-component.nbytes // ranks) + gathered + outside
    return ComponentFacts(component.name, component.group, nbytes, (), streams=False)


def share_of(memory: MemoryFacts, args: ParallelArgs, parallel: ParallelState) -> MemoryFacts:
    """One rank's part of its node's host; of the device too where that is the host."""
    launched = launched_rank()
    ranks = parallel.layout.world_size
    here = ranks // args.nnodes if launched is None else min(launched.local_world_size, ranks)
    if here <= 1:
        return memory
    host = None if memory.host_free is None else memory.host_free // here
    on_cpu = parallel.device.type == "cpu"
    return MemoryFacts(host if on_cpu else memory.device_free, memory.device_total, host)
