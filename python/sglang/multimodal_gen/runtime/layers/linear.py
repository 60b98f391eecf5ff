"""Linears whose weight is dealt over ranks.

Megatron-LM (Shoeybi et al., 2019): a column-parallel linear computes some of the outputs, a
row-parallel one reads some of the inputs and adds its part of the result to the others'. Between
the two, nothing is sent. A plan puts them in the place of plain linears (`tensor_parallel`);
constructors of models know plain linears alone.

Legend: I inputs, O outputs, G ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.layers.shard import Shard, sharded

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.layers.quantization.fp8 import Fp8Method

ProductHook = Callable[[Tensor, Tensor], Tensor]
"""A linear's input and its product with the local weight -> what stands for the product."""


class MethodLinear(nn.Linear):
    """A whole linear whose product is a method's: that of a quantised weight.

    Its parameters are put in by whoever installs the method; the bias is the plain linear's.
    """

    weight_scale: nn.Parameter
    method: Fp8Method

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)  # not Linear's: it would make a weight
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.bias = plain.bias
        self.training = plain.training

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return self.method.linear(input, self.weight, self.weight_scale, self.bias)


class ParallelLinear(nn.Linear):
    """A linear of which this rank holds a slice. ``in_features`` and ``out_features`` are the
    whole's.

    Attributes:
        shard: which slice of the weight [O, I].
        on_product: sees each local product before it is gathered or reduced: where a low-rank
            change of the weight is added.
        method: what stands for the local product where the weight is quantised: with scales of
            this rank's slice, and of a slice of the input where that is what comes.
    """

    weight_scale: nn.Parameter

    def __init__(self, whole: nn.Linear, group: Group, shard: Shard) -> None:
        nn.Module.__init__(self)  # not Linear's: it would make a whole weight
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.group = group
        self.shard = shard
        self.on_product: ProductHook | None = None
        self.method: Fp8Method | None = None
        self.weight = sharded(whole.weight, shard)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.method is None:
            product = F.linear(x, self.weight, bias)
        else:
            product = self.method.linear(x, self.weight, self.weight_scale, bias)
        return product if self.on_product is None else self.on_product(x, product)

    def extra_repr(self) -> str:
        """The whole's widths, and how many ranks hold it."""
        return f"{super().extra_repr()}, rank {self.shard.rank} of {self.shard.size}"


class ColumnParallelLinear(ParallelLinear):
    """Some of the outputs: weight [O / G, I], bias [O / G].

    ``blocks`` are the widths that the output is made of, where a forward splits it by position;
    each is dealt out by itself. With ``gather_output`` every rank gets the whole output, in order.
    """

    def __init__(
        self,
        whole: nn.Linear,
        group: Group,
        *,
        blocks: tuple[int, ...] | None = None,
        gather_output: bool = False,
    ) -> None:
        blocks = (whole.out_features,) if blocks is None else blocks
        if gather_output and len(blocks) > 1:
            raise ValueError("a gathered output is in order only if it is dealt out as one block")
        shard = Shard(0, blocks, group.rank, group.size)
        super().__init__(whole, group, shard)
        self.bias = None if whole.bias is None else sharded(whole.bias, shard)
        self.gather_output = gather_output

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., O / G], or [..., O] if gathered."""
        product = self._product(input, self.bias)
        return self.group.all_gather(product, dim=-1) if self.gather_output else product


class RowParallelLinear(ParallelLinear):
    """Some of the inputs: weight [O, I / G]; every rank gets the whole output.

    ``blocks`` are the widths of the parts that a packed input is concatenated of: its input here is
    this rank's piece of each. The bias is whole, and added once, after the sum over ranks.
    """

    def __init__(
        self, whole: nn.Linear, group: Group, *, blocks: tuple[int, ...] | None = None
    ) -> None:
        blocks = (whole.in_features,) if blocks is None else blocks
        super().__init__(whole, group, Shard(1, blocks, group.rank, group.size))
        self.bias = whole.bias

    def forward(self, input: Tensor) -> Tensor:
        """[..., I / G] -> [..., O]."""
        half = input.is_cuda and input.dtype in (torch.float16, torch.bfloat16)
        if half and self.on_product is None:
            # One rank adds the bias, in its product: a pass over the result less.
            bias = self.bias if self.group.is_first else None
            return self.group.all_reduce(self._product(input, bias))
        output = self.group.all_reduce(self._product(input, None))
        return output if self.bias is None else output.add_(self.bias)
