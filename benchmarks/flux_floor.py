"""The least time a step of FLUX.1 can take: its operations, counted from the shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FLUX_DEV: Mapping[str, Any] = {
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": (16, 56, 56),
}
TOY: Mapping[str, Any] = {
    **FLUX_DEV,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 3,
    "joint_attention_dim": 40,
    "pooled_projection_dim": 24,
    "axes_dims_rope": (8, 12, 12),
}
SINUSOID_CHANNELS = 256
PIXELS_PER_TOKEN = 16


@dataclass(frozen=True)
class Workload:
    """What one step works on."""

    config: Mapping[str, Any]
    batch: int
    height: int
    width: int
    text_tokens: int

    @property
    def dim(self) -> int:
        """Width of the transformer."""
        return self.config["num_attention_heads"] * self.config["attention_head_dim"]

    @property
    def image_tokens(self) -> int:
        """Tokens of the packed latents: one for 16x16 pixels."""
        return (self.height // PIXELS_PER_TOKEN) * (self.width // PIXELS_PER_TOKEN)


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of one forward pass; a multiplication and an addition are two."""

    linears: float
    attention: float

    def floor_ms(self, linear_tflops: float, attention_tflops: float) -> float:
        """Milliseconds at the given rates, nothing else taking any time."""
        return self.linears / linear_tflops / 1e9 + self.attention / attention_tflops / 1e9

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def count_operations(work: Workload) -> Operations:
    """Operations of all linears, and of the two products of each attention."""
    c, d = work.config, work.dim
    sequence = work.text_tokens + work.image_tokens
    blocks = c["num_layers"] + c["num_single_layers"]

    # Both kinds of block spend 12 d^2 a token: q, k, v, out (4) and the feed-forward (8). In the
    # single block the out projection and the second half of the feed-forward are one matrix.
    per_token = 12 * d * d
    tokens = blocks * sequence * per_token
    tokens += work.image_tokens * 2 * c["in_channels"] * d  # x_embedder, proj_out
    tokens += work.text_tokens * c["joint_attention_dim"] * d

    # Once an image: modulations (two streams of 6 d, one of 3 d; the last norm 2 d), embedders.
    modulation = (c["num_layers"] * 12 + c["num_single_layers"] * 3 + 2) * d * d
    sinusoids = 2 if c["guidance_embeds"] else 1
    embedders = sinusoids * (SINUSOID_CHANNELS + d) * d + (c["pooled_projection_dim"] + d) * d

    linears = 2.0 * work.batch * (tokens + modulation + embedders)
    attention = 4.0 * work.batch * blocks * sequence * sequence * d
    return Operations(linears, attention)
