"""Position-wise feed-forward networks with the names of Diffusers' checkpoints."""

from __future__ import annotations

from torch import Tensor, nn

from sglang.multimodal_gen.runtime.layers.products import gelu_linear


class GELUProjection(nn.Module):
    """A linear and the tanh approximation of GELU; checkpoint name ``proj``."""

    def __init__(self, dim: int, inner_dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, inner_dim)

    def forward(self, x: Tensor, into: nn.Module | None = None) -> Tensor:
        """[..., dim] -> [..., inner_dim]; ``into`` is the linear that alone will read it."""
        return gelu_linear(x, self.proj, into)


class FeedForward(nn.Module):
    """Linear, GELU (tanh), linear; checkpoint names ``net.0.proj`` and ``net.2``.

    It is four times as wide inside unless ``inner_dim`` says otherwise.
    """

    def __init__(self, dim: int, inner_dim: int | None = None) -> None:
        super().__init__()
        inner_dim = 4 * dim if inner_dim is None else inner_dim
        # Position 1 is the reference's dropout, which has no weights.
        self.net = nn.ModuleList(
            [GELUProjection(dim, inner_dim), nn.Identity(), nn.Linear(inner_dim, dim)]
        )

    @property
    def up(self) -> nn.Module:
        """The linear that reads the input."""
        return self.net[0].proj  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        up, _, down = self.net
        return down(up(x, down))
