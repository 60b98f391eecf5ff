"""The optimiser: Muon for the matrices of the networks, AdamW for everything else.

Muon (Jordan et al., 2024, "Muon: An optimizer for hidden layers"): momentum whose matrix is
replaced by the nearest semi-orthogonal one. The factor ``0.2 sqrt(max(rows, columns))`` (Liu et
al., 2025, "Muon is scalable for LLM training") gives its updates AdamW's size, so one rate serves
both.

All state is on the device, and the rate is a tensor: a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

MOMENTUM = 0.95
UPDATE_SIZE = 0.2
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
EPSILON = 1e-8


def orthogonal(matrices_NRC: Tensor) -> Tensor:
    """Nearly the nearest semi-orthogonal matrices: singular values go to 0.7..1.2.

    By the quintic Newton-Schulz iteration, in bf16 on a GPU.
    """
    wide = matrices_NRC.shape[1] <= matrices_NRC.shape[2]
    x = matrices_NRC if wide else matrices_NRC.mT
    if x.is_cuda:
        x = x.bfloat16()
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).to(x.dtype)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(b * gram, gram, gram, alpha=c) @ x
    return (x if wide else x.mT).to(matrices_NRC.dtype)


class MuonAdamW:
    """Muon for the weights that ``is_matrix`` picks by name, AdamW for the others."""

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        is_matrix: Callable[[str, Tensor], bool],
        *,
        betas: tuple[float, float] = (0.9, 0.98),
        weight_decay: float = 0.02,
    ) -> None:
        self.betas, self.weight_decay = betas, weight_decay
        self.weights = [weight for _, weight in named]
        groups: dict[tuple[int, ...], list[int]] = {}
        self._plain: list[int] = []
        for index, (name, weight) in enumerate(named):
            if is_matrix(name, weight):
                groups.setdefault(tuple(weight.shape), []).append(index)
            else:
                self._plain.append(index)
        self._groups = list(groups.values())
        device = self.weights[0].device
        self.count = torch.zeros((), device=device)
        self.momentum = [
            torch.zeros(len(group), *self.weights[group[0]].shape, device=device)
            for group in self._groups
        ]
        self.first = [torch.zeros_like(self.weights[i]) for i in self._plain]
        self.second = [torch.zeros_like(self.weights[i]) for i in self._plain]
        self._decayed = [self.weights[i] for i in range(len(named)) if self.weights[i].ndim >= 2]

    def state(self) -> list[Tensor]:
        """All of the optimiser's memory, in a fixed order."""
        return [self.count, *self.momentum, *self.first, *self.second]

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], rate: Tensor) -> None:
        """One update; ``grads`` as ``named`` was ordered, float32."""
        self.count += 1
        torch._foreach_mul_(self._decayed, 1 - self.weight_decay * rate)
        for group, momentum in zip(self._groups, self.momentum, strict=True):
            self._muon([self.weights[i] for i in group], [grads[i] for i in group], momentum, rate)
        if self._plain:
            self._adam([grads[i] for i in self._plain], rate)

    def _muon(
        self, weights: list[Tensor], grads: list[Tensor], momentum: Tensor, rate: Tensor
    ) -> None:
        grad = torch.stack(grads)
        momentum.lerp_(grad, 1 - MOMENTUM)
        update = orthogonal(torch.lerp(grad, momentum, MOMENTUM))
        update = update * (-UPDATE_SIZE * max(update.shape[1:]) ** 0.5 * rate)
        torch._foreach_add_(weights, list(update.unbind(0)))

    def _adam(self, grads: list[Tensor], rate: Tensor) -> None:
        beta1, beta2 = self.betas
        torch._foreach_lerp_(self.first, grads, 1 - beta1)
        torch._foreach_mul_(self.second, beta2)
        torch._foreach_addcmul_(self.second, grads, grads, 1 - beta2)
        root = torch._foreach_sqrt(self.second)
        # Both bias corrections, folded into the rate and the square root.
        torch._foreach_mul_(root, (1 - beta2**self.count).rsqrt())
        torch._foreach_add_(root, EPSILON)
        update = torch._foreach_div(self.first, root)
        torch._foreach_mul_(update, -rate / (1 - beta1**self.count))
        torch._foreach_add_([self.weights[i] for i in self._plain], update)
