"""Matrix products that belong together, as fewer and larger calls of the library.

The modules stay linears under their checkpoint names, whole or dealt over ranks; of the latter the
products here are the local ones. Where one of them is something else (an adapter is on it, it is
quantised, its output is gathered), each function falls back to what its first sentence says, call
by call: that is a choice by type and place, not an attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.end_to_end import end_to_end
from sglang.multimodal_gen.runtime.layers.linear import ColumnParallelLinear, RowParallelLinear


def parallel_linears(x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
    """Each linear of ``x``: one product where `pack_linears` made the weights neighbours."""
    packed = None if torch.compiler.is_compiling() else _packed(linears)
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
    can = _mergeable(first) and not torch.is_grad_enabled()  # out= knows no gradients
    packed = [_packed(linears) for _, linears in streams] if can else []
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


def gelu_linear(x: Tensor, linear: nn.Module) -> Tensor:
    """``gelu(linear(x))``, tanh form; in the product's epilogue where cuBLAS has it."""
    if not _is_local(linear) or linear.bias is None or not _mergeable(x):
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
    row = linear if isinstance(linear, RowParallelLinear) and _is_untouched(linear) else None
    plain = linear if _is_plain(linear) else row
    if plain is None or plain.bias is None or not _mergeable(parts[0]):
        return linear(torch.cat(tuple(parts), dim=-1))
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
        return not linear.gather_output and _is_untouched(linear)
    return _is_plain(linear)


def _is_plain(linear: nn.Module) -> TypeGuard[nn.Linear]:
    return type(linear) is nn.Linear and _is_untouched(linear)


def _is_untouched(linear: nn.Module) -> bool:
    """No hook sees its forward, and no adapter its product."""
    hooked = linear._forward_hooks or linear._forward_pre_hooks
    return not hooked and getattr(linear, "on_product", None) is None


def _mergeable(x: Tensor) -> bool:
    """Half precision on a GPU; float32, the reference's, keeps the reference's order of sums."""
    half = x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)
    return half and not torch.compiler.is_compiling()
