"""Products in eight bits (e4m3): weights quantised once, inputs as they come.

*By row* each output's weights and each row of the input have a scale; *by tensor* there is one
scale for a weight and one for an input. Rows are the finer choice and no slower on a GPU of
compute capability 9.0; on the CPU both run by plain twins that widen the weight at each product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.ops.fp8_rows import (
    E4M3,
    FEW_ROWS,
    fp8_few_rows,
    fp8_product,
    join_rows,
    quantize_rows,
    scale_of,
    to_e4m3,
    wide,
)

WIDTH_MULTIPLE = 16
"""Of a weight's two widths on this rank: what the GPU's product takes."""

Granularity = Literal["row", "tensor"]


class QuantizedRows(NamedTuple):
    """An input as such a product reads it: e4m3 [M, I]; scale [M, 1], or [1, 1] for all rows."""

    values: Tensor
    scale: Tensor


class PendingInput(NamedTuple):
    """An input whose one reader is quantised by row, and makes it while it quantises: the GELU
    (tanh form) of ``last``, if ``gelu``, behind ``first``, if there is any.

    Only linears with a method, and `products`, take it; it is made only where the reader was named
    and is such a one.
    """

    last: Tensor
    gelu: bool = False
    first: Tensor | None = None

    @property
    def is_cuda(self) -> bool:
        """Whether it is on a GPU."""
        return self.last.is_cuda

    @property
    def dtype(self) -> torch.dtype:
        """Of what it stands for."""
        return self.last.dtype

    def value(self) -> Tensor:
        """What it stands for."""
        last = F.gelu(self.last, approximate="tanh") if self.gelu else self.last
        return last if self.first is None else torch.cat((self.first, last), dim=-1)

    def rows(self) -> QuantizedRows:
        """What it stands for, quantised by row, in one pass."""
        if self.first is None:
            return QuantizedRows(*quantize_rows(self.last, self.gelu))
        return QuantizedRows(*join_rows(self.first, self.last, self.gelu))


_ROWS = "quantized_rows"


def carrying(x: Tensor, rows: QuantizedRows) -> Tensor:
    """``x`` itself, which has its quantised rows with it; nobody may change it in place."""
    vars(x)[_ROWS] = rows
    return x


def carried(x: Tensor) -> QuantizedRows | None:
    """The rows that whoever made ``x`` quantised in the same pass; a compiler fuses by itself."""
    return None if torch.compiler.is_compiling() else vars(x).get(_ROWS)


@dataclass(frozen=True, slots=True)
class Fp8Method:
    """What stands for ``F.linear`` on a linear whose weight is e4m3, with ``weight_scale`` beside
    it: [O] by row, [1] by tensor."""

    granularity: Granularity = "row"

    @property
    def by_row(self) -> bool:
        """Whether each row has its scale."""
        return self.granularity == "row"

    def scales(self, outputs: int) -> int:
        """How many a weight has."""
        return outputs if self.by_row else 1

    def quantize_weight(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A weight [O, I] -> e4m3 [O, I] and its scales, of the slice that is given."""
        values = weight.detach().float()
        if self.by_row:
            scale = scale_of(values.abs().amax(dim=-1))
            return to_e4m3(values, scale[:, None]), scale
        scale = scale_of(values.abs().amax()).reshape(1)
        return to_e4m3(values, scale), scale

    def rows(self, x: Tensor | PendingInput) -> QuantizedRows:
        """An input, quantised; at no cost where it carries its rows."""
        if isinstance(x, PendingInput):
            return x.rows()
        if self.by_row:
            return carried(x) or QuantizedRows(*quantize_rows(x, False))
        flat = x.reshape(-1, x.shape[-1])
        scale = scale_of(flat.abs().amax())
        return QuantizedRows(to_e4m3(flat, scale), scale.reshape(1, 1))

    def linear(
        self, x: Tensor | PendingInput, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        """``x @ W.T + bias``, [..., I] -> [..., O], in the type of ``x``."""
        like = x.last if isinstance(x, PendingInput) else x
        shape = (*like.shape[:-1], weight.shape[0])
        if like.numel() <= FEW_ROWS * like.shape[-1]:
            value = x.value() if isinstance(x, PendingInput) else x
            flat = value.reshape(-1, value.shape[-1])
            return fp8_few_rows(flat, weight, weight_scale, bias).reshape(shape)
        out = like.new_empty(shape)
        self.into(self.rows(x), weight, weight_scale, bias, out.view(-1, weight.shape[0]))
        return out

    def into(
        self,
        rows: QuantizedRows,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        out: Tensor,
    ) -> None:
        """The same of rows that are quantised already; ``out`` [M, O] is written."""
        fp8_product(rows.values, rows.scale, weight, weight_scale, bias, out)


def dequantized(weight: Tensor, scale: Tensor) -> Tensor:
    """What a weight and its scales ([O] or one number) mean, in float32."""
    return wide(weight) * scale.reshape(-1, 1)


def fits(weight: Tensor) -> bool:
    """Whether a GPU can multiply with a weight of this shape."""
    return weight.ndim == 2 and not any(width % WIDTH_MULTIPLE for width in weight.shape)


_QUANTIZER, _SCALE = "quantizer", "is_scale"


def quantizer_of(tensor: Tensor) -> Fp8Method | None:
    """How what a file holds becomes this parameter; None if it is what the file holds."""
    return vars(tensor).get(_QUANTIZER)


def is_scale(tensor: Tensor) -> bool:
    """Whether a parameter is scales of another: made with it, and always float32."""
    return _SCALE in vars(tensor)


def quantized_parameters(
    weight: nn.Parameter, method: Fp8Method
) -> tuple[nn.Parameter, nn.Parameter]:
    """Frozen places for a weight and its scales, as large as ``weight``: with its values, or on
    meta as it is. Which slice of a whole it is stays noted on it."""
    if weight.is_meta:
        values = torch.empty(weight.shape, dtype=E4M3, device="meta")
        scale = torch.empty(method.scales(weight.shape[0]), device="meta", dtype=torch.float32)
    else:
        values, scale = method.quantize_weight(weight)
    first, second = (nn.Parameter(t, requires_grad=False) for t in (values, scale))
    vars(first).update(vars(weight) | {_QUANTIZER: method})
    vars(second)[_SCALE] = True
    return first, second
