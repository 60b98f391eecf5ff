"""Sequence parallelism of a denoiser: its `SequencePlan`, met once, when it is built."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.layers.attention.split_sequence import (
    SequenceContext,
    SplitAttention,
    check_heads,
)
from sglang.multimodal_gen.runtime.layers.attention.usp import USPAttention
from sglang.multimodal_gen.runtime.layers.sequence_plan import (
    Edge,
    Place,
    SequencePlan,
    Split,
    sequence_plan,
)
from sglang.multimodal_gen.runtime.layers.sequence_shard import join_streams, split_streams
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, PipelineDefinitionError


def check_denoiser(
    model_class: type, config: Mapping[str, Any], parallel: ParallelState, name: str
) -> None:
    """Refuse, before weights are read, a denoiser that cannot be split as ``parallel`` says.

    Args:
        model_class: the class of the denoiser.
        config: its constructor's arguments, as far as the checkpoint gives them.
        parallel: this rank's place.
        name: the component, for messages.

    Raises:
        InvalidArgument: it has no ``SP_PLAN``, or a number of heads that does not divide.
    """
    if parallel.sp.size == 1:
        return
    _needed_plan(model_class, parallel, name)
    heads, tp = heads_of(model_class, config), parallel.tp.size
    if heads is not None and heads % tp == 0:  # tensor parallelism refuses the others
        label = f"{name} ({model_class.__name__})"
        if tp > 1:
            label = f"each of the tp_size={tp} ranks of {label}"
        check_heads(label, heads // tp, parallel.ulysses.size)


def heads_of(model_class: type, config: Mapping[str, Any]) -> int | None:
    """The number of heads that a denoiser will have; None if it has no plan, or does not tell."""
    plan = sequence_plan(model_class)
    if plan is None:
        return None
    argument = inspect.signature(model_class).parameters.get(plan.heads)
    heads = config.get(plan.heads, None if argument is None else argument.default)
    return heads if isinstance(heads, int) else None


def split_denoiser(denoiser: nn.Module, parallel: ParallelState, name: str) -> bool:
    """Put the denoiser's plan in force on this rank; whether its sequence is split now.

    Its table is checked on one rank too, so that a wrong line is found without a second GPU. There
    nothing is changed. A denoiser that was split before, for another pipeline, is left as it is.

    Raises:
        InvalidArgument: the sequence is to be split, and the model has no plan.
        PipelineDefinitionError: a line of the plan fits nothing in the model.
    """
    if parallel.sp.size == 1:
        plan = sequence_plan(type(denoiser))
        if plan is not None:
            plan.places(denoiser)
            plan.attention_layers(denoiser)
        return False
    plan = _needed_plan(type(denoiser), parallel, name)
    places = plan.places(denoiser)
    layers = {
        f"{name}.{layer}": (denoiser.get_submodule(layer), streams)
        for layer, streams in plan.attention_layers(denoiser).items()
    }
    context = SequenceContext.of(parallel)
    for layer, (attention, streams) in layers.items():
        assert isinstance(attention, USPAttention)
        if attention.is_split:
            return True
        attention.bind(SplitAttention(layer, streams, context))
    denoiser.register_forward_pre_hook(lambda _module, _args: context.begin())
    for module in {place.module: None for place in places}:
        _hook(module, [place for place in places if place.module is module], context)
    return True


def _needed_plan(model_class: type, parallel: ParallelState, name: str) -> SequencePlan:
    plan = sequence_plan(model_class)
    if plan is None:
        raise InvalidArgument(
            "sp_degree",
            parallel.sp.size,
            f"{name} ({model_class.__name__}) has no SP_PLAN in its file, so its sequence cannot "
            "be split; leave sp_degree, ulysses_degree and ring_degree out, or write the table "
            "(docs/adding_a_model.md)",
        )
    return plan


def _hook(module: nn.Module, places: Sequence[Place], context: SequenceContext) -> None:
    """Let a module's calls go through its edges."""
    arguments = [place for place in places if place.position is not None]
    returned = [place.edge for place in places if place.position is None]

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, named = list(args), dict(kwargs)
        for place in arguments:
            name, position = place.edge.value, place.position
            if name in named:
                named[name] = _through(place.edge, named[name], context)
            elif position is not None and position < len(given):
                given[position] = _through(place.edge, given[position], context)
        return tuple(given), named

    def after(_module: nn.Module, _args: object, output: Any) -> Any:
        for edge in returned:
            output = _through(edge, output, context)
        return output

    if arguments:
        module.register_forward_pre_hook(before, with_kwargs=True)
    if returned:
        module.register_forward_hook(after)


def _through(edge: Edge, value: Any, context: SequenceContext) -> Any:
    """A value on the other side of an edge."""
    if edge.item is not None:
        items = list(value)
        items[edge.item] = _through(replace(edge, item=None), items[edge.item], context)
        return _like(value, items)
    if value is None:
        return None
    if isinstance(value, Tensor):
        return (_split if isinstance(edge, Split) else _gather)(edge, value, context)
    if isinstance(value, Mapping):
        return {key: _through(edge, item, context) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return _like(value, [_through(edge, item, context) for item in value])
    raise PipelineDefinitionError(
        f"SP_PLAN: {edge} meets a {type(value).__name__}; it can be a tensor, or tuples, lists or "
        "dicts of tensors"
    )


def _like(value: Any, items: list[Any]) -> Any:
    """``items`` in a tuple, named tuple or list as ``value`` is."""
    return value._make(items) if hasattr(value, "_make") else type(value)(items)


def _split(edge: Edge, x: Tensor, context: SequenceContext) -> Tensor:
    length = x.shape[edge.dim]
    shard = context.shard
    unknown = [name for name in edge.names if not shard.knows(name)]
    known = sum(shard.length(name) for name in edge.names if shard.knows(name))
    if len(unknown) == 1:
        shard = shard.with_stream(unknown[0], length - known)
    elif unknown or known != length:
        why = f"those streams have {known}"
        if unknown:
            why = f"nothing above it tells the lengths of {' and '.join(unknown)}"
        raise PipelineDefinitionError(f"SP_PLAN: {edge} meets {length} tokens, but {why}")
    context.shard = shard
    return split_streams(x, shard, edge.names, context.sp.rank, edge.dim)


def _gather(edge: Edge, x: Tensor, context: SequenceContext) -> Tensor:
    local = context.shard.local(*edge.names)
    if x.shape[edge.dim] != local:
        raise PipelineDefinitionError(
            f"SP_PLAN: {edge} meets {x.shape[edge.dim]} tokens, but a rank's piece has {local}"
        )
    whole = context.sp.all_gather(x, edge.dim)
    return join_streams(whole, context.shard, edge.names, edge.dim)
