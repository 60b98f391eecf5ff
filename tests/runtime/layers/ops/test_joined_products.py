"""Products as operators: what a compiler is told of them is what they do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.layers.ops.joined_products import (
    concat_product,
    concat_product_plain,
    joint_products,
    joint_products_plain,
    shared_product,
    shared_product_plain,
)
from sglang.multimodal_gen.runtime.layers.ops.qk_norm_rotary import (
    qk_norm_rotary_join,
    qk_norm_rotary_join_plain,
)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def apart(count: int, outputs: int = 6, inputs: int = 4) -> tuple[list[Tensor], list[Tensor]]:
    draw = torch.Generator().manual_seed(count)
    weights = [torch.randn(outputs, inputs, generator=draw) for _ in range(count)]
    return weights, [torch.randn(outputs, generator=draw) for _ in range(count)]


def side_by_side(tensors: list[Tensor]) -> list[Tensor]:
    return list(torch.cat(tensors).split([len(x) for x in tensors]))


WEIGHTS, BIASES = apart(4)
PACKED = [*side_by_side(WEIGHTS[:2]), *side_by_side(WEIGHTS[2:])]
PACKED_BIASES = [*side_by_side(BIASES[:2]), *side_by_side(BIASES[2:])]
STREAMS = [random(1, 3, 4), random(1, 5, 4)]
HEADS = [random(2, 3, 2, 8), random(2, 5, 2, 8)]
ANGLES = random(8, 4)
CALLS = {
    "apart": (shared_product, shared_product_plain, (random(2, 3, 4), WEIGHTS, BIASES)),
    "packed": (shared_product, shared_product_plain, (random(2, 3, 4), PACKED[:2], [])),
    "streams": (joint_products, joint_products_plain, (STREAMS, PACKED, PACKED_BIASES)),
    "streams apart": (joint_products, joint_products_plain, (STREAMS, WEIGHTS, BIASES)),
    "parts": (
        concat_product, concat_product_plain,
        ([random(2, 3, 4), random(2, 3, 2)], random(6, 6), random(6)),
    ),
    "heads": (
        qk_norm_rotary_join, qk_norm_rotary_join_plain,
        (HEADS, HEADS, [random(8)] * 2, [random(8) + 1] * 2, ANGLES.cos(), ANGLES.sin(),
         [1e-6, 1e-6]),
    ),
}  # fmt: skip
NAMES = {
    shared_product: "shared_product",
    joint_products: "joint_products",
    concat_product: "concat_product",
    qk_norm_rotary_join: "qk_norm_rotary_join",
}


@pytest.mark.parametrize("case", CALLS)
def test_an_operator_says_what_its_twin_says_and_leaves_its_arguments_alone(case):
    call, plain, arguments = CALLS[case]
    torch.testing.assert_close(call(*arguments), plain(*arguments))
    operator = getattr(torch.ops.sgl_diffusion, NAMES[call]).default
    checks = ("test_schema", "test_faketensor")
    told = torch.library.opcheck(operator, arguments, test_utils=checks)
    assert set(told.values()) == {"SUCCESS"}
