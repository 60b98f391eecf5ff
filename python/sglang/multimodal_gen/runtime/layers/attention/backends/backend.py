"""What can stand behind `USPAttention`, and a library's kernel in that place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.layers.attention.backends import sdpa
from sglang.multimodal_gen.runtime.layers.attention.backends.with_lse import attend_with_lse
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument


class AttentionBackend(Protocol):
    """Attention in the layout of `USPAttention`: [B, S, H, D], masks boolean, True = attend."""

    @property
    def name(self) -> str:
        """As ``--attention-backend`` takes it."""
        ...

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Those of q, k and v that it takes; empty: all."""
        ...

    @property
    def gives_lse(self) -> bool:
        """Whether it has `attend_with_lse`: ring attention needs it."""
        ...

    @property
    def graph_safe(self) -> bool:
        """Whether a CUDA graph can hold it, with masks whose values change."""
        ...

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool
    ) -> Tensor:
        """Attention over T keys, [B, S, H, D]."""
        ...

    def attend_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """The same, and the log-sum-exp of the scores, float32 [B, S, H]."""
        ...


Kernel = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
KernelWithLSE = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class KernelBackend:
    """A library's kernel. What it has no notion of goes to torch's own: masks, and causal attention
    where queries and keys differ in number (libraries do not agree on what that means).

    Attributes:
        kernel: (q, k, v, causal) -> [B, S, H, D].
        kernel_with_lse: the same, and the log-sum-exp [B, S, H]; None where it tells none.
        widths: of heads that it takes: these, or any up to the only one.
        calls: calls to the ``kernel`` and, for the reasons above, to ``torch``: the proof of where
            they went. Not counted while torch compiles; a graph's are counted when it is recorded.
    """

    name: str
    kernel: Kernel
    kernel_with_lse: KernelWithLSE | None
    dtypes: tuple[torch.dtype, ...]
    widths: tuple[int, ...]
    graph_safe: bool = True
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def gives_lse(self) -> bool:
        """Whether the library's kernel tells its log-sum-exp."""
        return self.kernel_with_lse is not None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool
    ) -> Tensor:
        """As `AttentionBackend.attend`.

        Raises:
            InvalidArgument: heads of a width that the kernel does not take.
        """
        if not self._takes(q, k, mask, causal):
            return sdpa.attend(q, k, v, mask=mask, causal=causal)
        return self.kernel(q, k, v, causal)

    def attend_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """As `AttentionBackend.attend_with_lse`."""
        assert self.kernel_with_lse is not None, f"{self.name} in a ring"
        if not self._takes(q, k, mask, causal):
            return attend_with_lse(q, k, v, mask=mask, causal=causal)
        return self.kernel_with_lse(q, k, v, causal)

    def _takes(self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> bool:
        width = q.shape[-1]
        if not (width in self.widths or (len(self.widths) == 1 and width <= self.widths[0])):
            known = f"up to {self.widths[0]}" if len(self.widths) == 1 else f"{self.widths}"
            problem = f"its heads are {known} wide, and this model's {width}. Leave it out"
            raise InvalidArgument("attention_backend", self.name, problem)
        takes = mask is None and not (causal and q.shape[1] != k.shape[1])
        if not torch.compiler.is_compiling():
            self.calls["kernel" if takes else "torch"] += 1
        return takes


@dataclass(frozen=True, eq=False)
class ByLength:
    """One backend for short sequences, another from some number of tokens on.

    The other must take the tensors' dtype, and heads of one of ``widths``, too.
    """

    name: str
    short: AttentionBackend
    long: AttentionBackend
    tokens: int
    widths: tuple[int, ...]

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Those of the one for short sequences, which takes what the other does not."""
        return self.short.dtypes

    @property
    def gives_lse(self) -> bool:
        """Whether both do."""
        return self.short.gives_lse and self.long.gives_lse

    @property
    def graph_safe(self) -> bool:
        """Whether both are."""
        return self.short.graph_safe and self.long.graph_safe

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool
    ) -> Tensor:
        """As `AttentionBackend.attend`."""
        return self._of(q, k).attend(q, k, v, mask=mask, causal=causal)

    def attend_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """As `AttentionBackend.attend_with_lse`."""
        return self._of(q, k).attend_with_lse(q, k, v, mask=mask, causal=causal)

    def _of(self, q: Tensor, k: Tensor) -> AttentionBackend:
        fits = q.dtype in self.long.dtypes and q.shape[-1] in self.widths
        return self.long if fits and min(q.shape[1], k.shape[1]) >= self.tokens else self.short
