"""LoRA as a method put on a finished linear: added to its output, or merged into its weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sglang.multimodal_gen.runtime.layers.linear import ParallelLinear
from sglang.multimodal_gen.runtime.layers.lora.low_rank import Term, stacked
from sglang.multimodal_gen.runtime.layers.quantization.fp8 import dequantized
from sglang.multimodal_gen.runtime.layers.quantization.install import method_of
from sglang.multimodal_gen.runtime.utils.errors import UserError


class LoRALinear:
    """The adapters of one linear. At rest the linear is exactly what it was before.

    *Live*: a forward hook adds the low-rank path to the output; the weight is not touched. A linear
    that is dealt over ranks adds its slice of the path to its own product, which is then gathered
    or summed with the product.
    *Merged*: the weight holds base plus change, computed in float32 and rounded once; a copy of the
    base stays in host memory, so that `clear` restores it bit for bit. A weight in eight bits is
    never merged into: its rounding would take most of the change.
    """

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear
        self._base: Tensor | None = None
        self._hook: RemovableHandle | None = None
        self._down: Tensor | None = None
        self._up: Tensor | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether this process holds only a part of the weight (torch's DTensor)."""
        return hasattr(self.linear.weight, "to_local")

    @property
    def is_quantized(self) -> bool:
        """Whether the weight is held in eight bits."""
        return method_of(self.linear) is not None

    @property
    def base_weight(self) -> Tensor:
        """The weight without any adapter; of one in eight bits what it means, in float32."""
        if self.is_quantized:
            return dequantized(self.linear.weight, self.linear.weight_scale)  # type: ignore[arg-type]
        return self.linear.weight if self._base is None else self._base

    def clear(self) -> None:
        """Back to the base, bit for bit."""
        if self._hook is not None:
            self._hook.remove()
        if isinstance(self.linear, ParallelLinear):
            self.linear.on_product = None
        self._hook = self._down = self._up = None
        if self._base is not None:
            with torch.no_grad():
                self.linear.weight.copy_(self._base)
            self._base = None

    def run_live(self, terms: Sequence[Term]) -> None:
        """Add the terms in each forward, instead of whatever was there."""
        self.clear()
        weight = self.linear.weight
        down, up = self._factors(terms)
        if not self.is_quantized:  # else in the inputs' type, when the first comes
            down, up = down.to(weight.dtype), up.to(weight.dtype)
        self._down, self._up = down, up
        if isinstance(self.linear, ParallelLinear):
            self.linear.on_product = self._add_to
        else:
            self._hook = self.linear.register_forward_hook(self._add, with_kwargs=True)

    def merge(self, terms: Sequence[Term]) -> tuple[float, float]:
        """Put the terms into the weight, instead of whatever was there.

        Returns the squared norms of what rounding to the weight's dtype took from the change, and
        of the change; of this rank's slice of it.
        """
        self.clear()
        weight = self.linear.weight
        if self.is_sharded:
            raise UserError(
                "adapters cannot be merged into weights that are sharded over ranks "
                "(use_fsdp_inference); use merge_mode 'dynamic'"
            )
        if self.is_quantized:
            raise UserError(
                "adapters cannot be merged into weights that are held in eight bits "
                "(quantization): rounding would take most of their change; use merge_mode 'dynamic'"
            )
        down, up = self._factors(terms)
        change = up @ down
        self._base = weight.detach().to("cpu", copy=True)
        wide = weight.detach().to(torch.float32, copy=True)
        with torch.no_grad():
            weight.copy_(wide + change)
        lost = change - (weight.detach().to(torch.float32) - wide)
        return lost.square().sum().item(), change.square().sum().item()

    def _add(
        self, linear: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor
    ) -> Tensor:
        return self._add_to(args[0] if args else kwargs["input"], output)

    def _factors(self, terms: Sequence[Term]) -> tuple[Tensor, Tensor]:
        """The terms' sum as a pair of factors of the weight, or of this rank's slice of it."""
        down, up = stacked(tuple(terms), self.linear.weight.device)
        if not isinstance(self.linear, ParallelLinear):
            return down, up
        shard = self.linear.shard
        return (down, shard.of(up)) if shard.dim == 0 else (shard.of(down), up)

    def _add_to(self, x: Tensor, output: Tensor) -> Tensor:
        down, up = self._down, self._up
        assert down is not None
        assert up is not None
        if down.device != x.device or down.dtype != x.dtype:  # moved, or computing in another type
            down, up = down.to(x.device, x.dtype), up.to(x.device, x.dtype)
            self._down, self._up = down, up
        inner = nn.functional.linear(x, down)
        # One pass over the output: the product is accumulated onto it by the matmul itself.
        rows = output.reshape(-1, output.shape[-1])
        return torch.addmm(rows, inner.reshape(-1, inner.shape[-1]), up.T).view_as(output)
