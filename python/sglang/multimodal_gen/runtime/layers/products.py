"""Matrix products that belong together, as fewer and larger calls of the library.

The modules stay linears under their checkpoint names, whole or dealt over ranks; of the latter the
products here are the local ones. Quantised ones share an input that is quantised once. Where one of
them is something else (an adapter is on it, its output is gathered), each function falls back to
what its first sentence says, call by call: that is a choice by type and place, not an attempt.

``into`` names a linear that will read a result, where a model's file says so. A quantised one
reads rows of eight bits, which whoever makes the result can make in the same pass over memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.end_to_end import end_to_end
from sglang.multimodal_gen.runtime.layers.linear import (
    ColumnParallelLinear,
    MethodLinear,
    RowParallelLinear,
)
from sglang.multimodal_gen.runtime.layers.ops import norm_modulate as norm
from sglang.multimodal_gen.runtime.layers.ops.joined_products import (
    concat_product,
    joint_products,
    shared_product,
)
from sglang.multimodal_gen.runtime.layers.ops.operator import wants_gradient
from sglang.multimodal_gen.runtime.layers.quantization.fp8 import (
    Fp8Method,
    PendingInput,
    QuantizedRows,
    carried,
    carrying,
)
from sglang.multimodal_gen.runtime.layers.quantization.install import method_of


def parallel_linears(x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
    """Each linear of ``x``: one product where `pack_linears` made the weights neighbours."""
    if any(method_of(linear) is not None for linear in linears):
        return _quantized_products(x, linears)
    if torch.compiler.is_compiling():
        return _compiled_products(x, linears)
    packed = _packed(linears)
    if packed is None:
        return tuple(linear(x) for linear in linears)
    weight, bias = packed
    return F.linear(x, weight, bias).split(_widths(linears), dim=-1)


def joint_parallel_linears(
    *streams: tuple[Tensor, Sequence[nn.Module]],
) -> tuple[tuple[Tensor, ...], ...]:
    """`parallel_linears` of each stream: inputs [B, S, I] of its own, linears of its own.

    One sequence on a GPU (B = 1) has its streams' results end to end in one buffer [S, O], so that
    whoever joins the streams (`qk_norm.norm_rotate_join`) finds them joined.
    """
    first = streams[0][0]
    weights_read = (p for _, linears in streams for m in linears for p in m.parameters())
    read = chain((x for x, _ in streams), weights_read)
    may_join = _mergeable(first) and not wants_gradient(read)  # out= knows no gradients
    if torch.compiler.is_compiling():
        return _compiled_streams(streams, may_join)
    if (quantized := _quantized_streams(streams)) is not None:
        return quantized
    packed = [_packed(linears) for _, linears in streams] if may_join else []
    weights = [pair[0] for pair in packed if pair is not None and pair[1] is not None]
    if len(weights) < len(streams) or first.shape[0] != 1 or len({len(w) for w in weights}) > 1:
        return tuple(parallel_linears(x, *linears) for x, linears in streams)
    lengths = [x.shape[1] for x, _ in streams]
    joint = first.new_empty((sum(lengths), len(weights[0])))
    for rows, (x, _), pair in zip(joint.split(lengths), streams, packed, strict=True):
        assert pair is not None
        assert pair[1] is not None
        torch.addmm(pair[1], x.flatten(0, 1), pair[0].t(), out=rows)
    return tuple(
        rows[None].split(_widths(linears), dim=-1)
        for rows, (_, linears) in zip(joint.split(lengths), streams, strict=True)
    )


def gelu_linear(x: Tensor, linear: nn.Module, into: nn.Module | None = None) -> Tensor:
    """``gelu(linear(x))``, tanh form; in the product's epilogue where cuBLAS has it.

    Where ``into`` is quantised it must be the only reader, alone or through `concat_linear`: the
    GELU is then left to it (`PendingInput`).
    """
    if reads_rows(into):
        return PendingInput(linear(x), gelu=True)  # type: ignore[return-value]
    # A compiler fuses the GELU with what comes after it; the epilogue has no backward.
    alone = torch.compiler.is_compiling() or wants_gradient(chain((x,), linear.parameters()))
    if alone or not _is_local(linear) or linear.bias is None or not _mergeable(x):
        return F.gelu(linear(x), approximate="tanh")
    flat = x.reshape(-1, x.shape[-1])
    out = torch._addmm_activation(linear.bias, flat, linear.weight.t(), use_gelu=True)
    return out.unflatten(0, x.shape[:-1])


def concat_linear(parts: Sequence[Tensor], linear: nn.Module) -> Tensor:
    """``linear(cat(parts))`` along the last dimension; summed part by part on a GPU.

    A row-parallel linear's sum over ranks comes after that.

    Writing a concatenation of 4,608 x 15,360 takes as long as a product's tenth; a product that
    adds to the one before takes nearly nothing more.
    """
    if reads_rows(linear) and len(parts) == 2:
        first, last = parts
        pending = last if isinstance(last, PendingInput) else PendingInput(last)
        return linear(pending._replace(first=first))
    row = linear if _is_plain_row(linear) else None
    plain = linear if _is_plain(linear) else row
    if plain is None or plain.bias is None or not _mergeable(parts[0]):
        return linear(torch.cat(tuple(parts), dim=-1))
    if torch.compiler.is_compiling():
        if row is not None:
            return linear(torch.cat(tuple(parts), dim=-1))
        return concat_product(list(parts), plain.weight, plain.bias)
    weights = plain.weight.split([part.shape[-1] for part in parts], dim=1)
    flat = [part.reshape(-1, part.shape[-1]) for part in parts]
    if row is not None and not row.group.is_first:  # one rank adds the bias, in its product
        out = flat[0] @ weights[0].t()
    else:
        out = torch.addmm(plain.bias, flat[0], weights[0].t())
    for part, weight in zip(flat[1:], weights[1:], strict=True):
        out.addmm_(part, weight.t())
    if row is not None:
        out = row.group.all_reduce(out)
    return out.unflatten(0, parts[0].shape[:-1])


def norm_modulate(
    x: Tensor,
    shift: Tensor,
    scale: Tensor,
    into: nn.Module | None = None,
    *,
    eps: float = norm.EPS,
    affine: bool = False,
) -> Tensor:
    """`ops.norm_modulate`; with the rows quantised beside it where ``into`` reads such."""
    if not reads_rows(into):
        return norm.norm_modulate(x, shift, scale, eps, affine)
    normed, *rows = norm.norm_modulate_rows(x, shift, scale, eps, affine)
    return carrying(normed, QuantizedRows(*rows))


def add_gated_norm_modulate(
    residual: Tensor,
    gate: Tensor | None,
    update: Tensor,
    shift: Tensor,
    scale: Tensor,
    into: nn.Module | None = None,
    *,
    eps: float = norm.EPS,
    affine: bool = False,
) -> tuple[Tensor, Tensor]:
    """`ops.add_gated_norm_modulate`; the normed one as `norm_modulate` here gives it."""
    if not reads_rows(into):
        return norm.add_gated_norm_modulate(residual, gate, update, shift, scale, eps, affine)
    x, normed, *rows = norm.add_gated_norm_modulate_rows(
        residual, gate, update, shift, scale, eps, affine
    )
    return x, carrying(normed, QuantizedRows(*rows))


def reads_rows(linear: nn.Module | None) -> bool:
    """Whether a linear takes its input quantised by row; one with an adapter needs all of it."""
    method = None if linear is None else method_of(linear)
    if method is None or not method.by_row or linear is None:
        return False
    return _is_untouched(linear) and not torch.compiler.is_compiling()


class _Together(NamedTuple):
    """Linears that are quantised alike, as one: their weights, scales and biases end to end."""

    method: Fp8Method
    weight: Tensor
    scale: Tensor
    bias: Tensor | None


def _together(linears: Sequence[nn.Module]) -> _Together | None:
    """None unless all are quantised by row, untouched, local, and neighbours in memory."""
    local = [linear for linear in linears if _is_local_method(linear)]
    biases = [linear.bias for linear in local if linear.bias is not None]
    if len(local) < len(linears) or len(biases) not in (0, len(local)):
        return None
    weight = end_to_end([linear.weight for linear in local])
    scale = end_to_end([linear.weight_scale for linear in local])
    bias = end_to_end(biases) if biases else None
    if weight is None or scale is None or (biases and bias is None):
        return None
    return _Together(local[0].method, weight, scale, bias)


def _quantized_products(x: Tensor, linears: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Each linear of ``x``, some of them quantised: by row, once for all of them."""
    if (together := _together(linears)) is not None:
        product = together.method.linear(x, together.weight, together.scale, together.bias)
        return product.split([len(linear.weight) for linear in linears], dim=-1)  # type: ignore[arg-type]
    methods = [method_of(linear) for linear in linears]
    by_row = [method for method in methods if method is not None and method.by_row]
    if len(by_row) > 1 and carried(x) is None:
        x = carrying(x.view_as(x), by_row[0].rows(x))  # a view: the caller's tensor stays bare
    return tuple(linear(x) for linear in linears)


def _quantized_streams(
    streams: Sequence[tuple[Tensor, Sequence[nn.Module]]],
) -> tuple[tuple[Tensor, ...], ...] | None:
    """As `joint_parallel_linears`: one sequence's products end to end."""
    packed = [t for _, linears in streams if (t := _together(linears)) is not None]
    first, widths = streams[0][0], {len(t.weight) for t in packed}
    if len(packed) < len(streams) or first.shape[0] != 1 or len(widths) > 1:
        return None
    lengths = [x.shape[1] for x, _ in streams]
    joint = first.new_empty((sum(lengths), *widths))
    for rows, (x, _), t in zip(joint.split(lengths), streams, packed, strict=True):
        t.method.into(t.method.rows(x), t.weight, t.scale, t.bias, rows)
    return tuple(
        rows[None].split([len(linear.weight) for linear in linears], dim=-1)  # type: ignore[arg-type]
        for rows, (_, linears) in zip(joint.split(lengths), streams, strict=True)
    )


def _compiled_products(x: Tensor, linears: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """`parallel_linears` while torch compiles: an operator asks where the weights lie."""
    plain = [linear for linear in linears if _is_local(linear)]
    biases: list[Tensor] = [linear.bias for linear in plain if linear.bias is not None]
    if len(plain) < len(linears) or len(biases) not in (0, len(plain)):
        return tuple(linear(x) for linear in linears)
    product = shared_product(x, [linear.weight for linear in plain], biases)
    return product.split(_widths(linears), dim=-1)


def _compiled_streams(
    streams: Sequence[tuple[Tensor, Sequence[nn.Module]]], may_join: bool
) -> tuple[tuple[Tensor, ...], ...]:
    """`joint_parallel_linears` while torch compiles."""
    plain = [linear for _, linears in streams for linear in linears if _is_local(linear)]
    biases: list[Tensor] = [linear.bias for linear in plain if linear.bias is not None]
    counts = {len(linears) for _, linears in streams}
    widths = {sum(_widths(linears)) for _, linears in streams}
    whole = len(plain) == len(biases) == sum(len(linears) for _, linears in streams)
    if not (may_join and whole and len(counts) == len(widths) == 1 and streams[0][0].shape[0] == 1):
        return tuple(parallel_linears(x, *linears) for x, linears in streams)
    joint = joint_products([x for x, _ in streams], [linear.weight for linear in plain], biases)
    lengths = [x.shape[1] for x, _ in streams]
    return tuple(
        rows[None].split(_widths(linears), dim=-1)
        for rows, (_, linears) in zip(joint.split(lengths), streams, strict=True)
    )


def pack_linears(module: nn.Module) -> int:
    """Make the weights of linears that share an input neighbours in memory; returns how many sets.

    A class says which of its children share one: ``shared_input = (("to_q", "to_k", "to_v"),)``.
    The parameters stay themselves, as views; whoever replaces one of them undoes the packing.
    """
    sets = 0
    for owner in module.modules():
        for names in getattr(type(owner), "shared_input", ()):
            linears = [owner.get_submodule(name) for name in names if hasattr(owner, name)]
            plain = [linear for linear in linears if _is_local(linear)]
            quantized = [linear for linear in linears if _is_local_method(linear)]
            if len(quantized) == len(names):
                _pack([linear.weight_scale for linear in quantized])
                plain = quantized
            if len(plain) == len(names):
                _pack([linear.weight for linear in plain])
                _pack([linear.bias for linear in plain if linear.bias is not None])
                sets += 1
    return sets


def _pack(parameters: Sequence[Tensor]) -> None:
    if not parameters:
        return
    packed = torch.cat([parameter.data for parameter in parameters])
    sizes = [parameter.shape[0] for parameter in parameters]
    for parameter, piece in zip(parameters, packed.split(sizes), strict=True):
        parameter.data = piece


def _packed(linears: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None] | None:
    """One weight and bias that cover those of all linears, if they lie side by side."""
    plain = [linear for linear in linears if _is_local(linear)]
    weight = end_to_end([linear.weight for linear in plain]) if len(plain) == len(linears) else None
    biases = [linear.bias for linear in plain if linear.bias is not None]
    if weight is None or len(biases) not in (0, len(plain)):
        return None
    bias = end_to_end(biases) if biases else None
    return None if biases and bias is None else (weight, bias)


def _widths(linears: Sequence[nn.Module]) -> list[int]:
    return [linear.weight.shape[0] for linear in linears if _is_local(linear)]


def _is_local(linear: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether its result is its weight's product and its bias, and nothing else."""
    if type(linear) is ColumnParallelLinear:
        return linear.method is None and not linear.gather_output and _is_untouched(linear)
    return _is_plain(linear)


def _is_local_method(linear: nn.Module) -> TypeGuard[MethodLinear]:
    """The same of a quantised linear's method, by row."""
    method = method_of(linear)
    gathered = getattr(linear, "gather_output", False) or isinstance(linear, RowParallelLinear)
    compiling = torch.compiler.is_compiling()
    return (
        method is not None
        and method.by_row
        and not gathered
        and not compiling
        and _is_untouched(linear)
    )


def _is_plain_row(linear: nn.Module) -> TypeGuard[RowParallelLinear]:
    row = isinstance(linear, RowParallelLinear) and linear.method is None
    return row and _is_untouched(linear)


def _is_plain(linear: nn.Module) -> TypeGuard[nn.Linear]:
    return type(linear) is nn.Linear and _is_untouched(linear)


def _is_untouched(linear: nn.Module) -> bool:
    """No hook sees its forward, and no adapter its product."""
    hooked = linear._forward_hooks or linear._forward_pre_hooks
    return not hooked and getattr(linear, "on_product", None) is None


def _mergeable(x: Tensor) -> bool:
    """Half precision on a GPU; float32, the reference's, keeps the reference's order of sums."""
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)
