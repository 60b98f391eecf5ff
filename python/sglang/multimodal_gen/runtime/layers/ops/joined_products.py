"""Products that share an input or a result, as operators: what `layers.products` does by addresses.

A compiler knows no addresses, so whether weights lie side by side is asked when the operator runs.
Each result is a tensor of its own, and no argument is written to: compilers copy what is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang.multimodal_gen.runtime.layers.end_to_end import end_to_end
from sglang.multimodal_gen.runtime.layers.ops.operator import fused_operator


def shared_product_plain(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """Each weight's product with ``x`` [..., I], side by side: [..., the sum of O].

    ``biases``: one for each weight, or none.
    """
    pairs = zip(weights, biases or [None] * len(weights), strict=True)
    return torch.cat([F.linear(x, weight, bias) for weight, bias in pairs], dim=-1)


def joint_products_plain(
    inputs: list[Tensor], weights: list[Tensor], biases: list[Tensor]
) -> Tensor:
    """The `shared_product` of each stream, one after another: [the sum of S, the sum of O].

    inputs [1, S, I]; weights and biases of the first stream, then of the second, as many of each.
    """
    each = len(weights) // len(inputs)
    return torch.cat(
        [
            shared_product_plain(x[0], weights[i : i + each], biases[i : i + each])
            for x, i in zip(inputs, range(0, len(weights), each), strict=True)
        ]
    )


def concat_product_plain(parts: list[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    """``cat(parts) @ weight.T + bias`` along the last dimension."""
    return F.linear(torch.cat(parts, dim=-1), weight, bias)


def _shared_launch(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    weight = end_to_end(weights)
    bias = end_to_end(biases) if biases else None
    if weight is None or (biases and bias is None):
        return shared_product_plain(x, weights, biases)
    return F.linear(x, weight, bias)


def _joint_launch(inputs: list[Tensor], weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    """Written where it is wanted; by the twin where a stream's weights do not lie side by side."""
    each = len(weights) // len(inputs)
    starts = range(0, len(weights), each)
    packed = [end_to_end(weights[i : i + each]) for i in starts]
    shifts = [end_to_end(biases[i : i + each]) for i in starts]
    if any(x is None for x in (*packed, *shifts)):
        return joint_products_plain(inputs, weights, biases)
    lengths = [x.shape[1] for x in inputs]
    joint = inputs[0].new_empty((sum(lengths), sum(len(w) for w in weights[:each])))
    for rows, x, weight, bias in zip(joint.split(lengths), inputs, packed, shifts, strict=True):
        assert weight is not None
        assert bias is not None
        torch.addmm(bias, x.flatten(0, 1), weight.t(), out=rows)
    return joint


def _concat_launch(parts: list[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    """A product that adds to the one before takes nearly nothing more; a concatenation does."""
    weights = weight.split([part.shape[-1] for part in parts], dim=1)
    flat = [part.reshape(-1, part.shape[-1]) for part in parts]
    out = torch.addmm(bias, flat[0], weights[0].t())
    for part, piece in zip(flat[1:], weights[1:], strict=True):
        out.addmm_(part, piece.t())
    return out.unflatten(0, parts[0].shape[:-1])


shared_product = fused_operator(
    "shared_product(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor",
    shared_product_plain,
    _shared_launch,
    needs_triton=False,
    on_cpu=True,
)
joint_products = fused_operator(
    "joint_products(Tensor[] inputs, Tensor[] weights, Tensor[] biases) -> Tensor",
    joint_products_plain,
    _joint_launch,
    needs_triton=False,
    on_cpu=True,
)
concat_product = fused_operator(
    "concat_product(Tensor[] parts, Tensor weight, Tensor bias) -> Tensor",
    concat_product_plain,
    _concat_launch,
    needs_triton=False,
    on_cpu=True,
)
