"""LoRA files for the tiny checkpoints, in the styles that trainers write, strong enough to see."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

ATTN, SINGLE = "transformer_blocks.{i}.attn.", "single_transformer_blocks.{i}."

AUTHORS_NAMES: Mapping[str, tuple[str, ...]] = {
    "double_blocks.{i}.img_attn.qkv": (ATTN + "to_q", ATTN + "to_k", ATTN + "to_v"),
    "double_blocks.{i}.txt_attn.qkv": (
        ATTN + "add_q_proj",
        ATTN + "add_k_proj",
        ATTN + "add_v_proj",
    ),
    "double_blocks.{i}.img_attn.proj": (ATTN + "to_out.0",),
    "double_blocks.{i}.txt_attn.proj": (ATTN + "to_add_out",),
    "double_blocks.{i}.img_mod.lin": ("transformer_blocks.{i}.norm1.linear",),
    "double_blocks.{i}.txt_mod.lin": ("transformer_blocks.{i}.norm1_context.linear",),
    "double_blocks.{i}.img_mlp.0": ("transformer_blocks.{i}.ff.net.0.proj",),
    "double_blocks.{i}.img_mlp.2": ("transformer_blocks.{i}.ff.net.2",),
    "double_blocks.{i}.txt_mlp.0": ("transformer_blocks.{i}.ff_context.net.0.proj",),
    "double_blocks.{i}.txt_mlp.2": ("transformer_blocks.{i}.ff_context.net.2",),
    "single_blocks.{i}.linear1": (
        SINGLE + "attn.to_q",
        SINGLE + "attn.to_k",
        SINGLE + "attn.to_v",
        SINGLE + "proj_mlp",
    ),
    "single_blocks.{i}.linear2": (SINGLE + "proj_out",),
    "single_blocks.{i}.modulation.lin": (SINGLE + "norm.linear",),
}
"""The authors' names -> Diffusers' names of the rows, in order; apart from the runtime's."""


class Adapter:
    """Tensors of one adapter, drawn from a seeded generator."""

    def __init__(self, model: nn.Module, seed: int, strength: float = 0.5) -> None:
        self.linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        self.generator = torch.Generator().manual_seed(seed)
        self.strength = strength
        self.tensors: dict[str, Tensor] = {}
        self.changes: dict[str, Tensor] = {}
        """Linear's path -> the change of its weight at weight 1: the oracle."""

    def factors(self, width: int, rows: int, rank: int) -> tuple[Tensor, Tensor]:
        """A of standard deviation 1/sqrt(width), B of ``strength``/sqrt(rank)."""
        down = torch.randn(rank, width, generator=self.generator) / width**0.5
        up = torch.randn(rows, rank, generator=self.generator) * self.strength / rank**0.5
        return down, up

    def add(
        self,
        paths: tuple[str, ...],
        prefix: str,
        *,
        rank: int = 4,
        alpha: float | None = None,
        scaling: float | None = None,
        parts: tuple[str, str] = (".lora_A.weight", ".lora_B.weight"),
    ) -> None:
        """Factors over the rows of ``paths`` together, under ``prefix``; alpha as a key if given.

        ``scaling`` is what a configuration elsewhere makes of them.
        """
        sizes = [self.linears[path].out_features for path in paths]
        down, up = self.factors(self.linears[paths[0]].in_features, sum(sizes), rank)
        self.tensors[prefix + parts[0]], self.tensors[prefix + parts[1]] = down, up
        if alpha is not None:
            self.tensors[prefix + ".alpha"] = torch.tensor(float(alpha))
        if scaling is None:
            scaling = 1.0 if alpha is None else alpha / rank
        for path, rows in zip(paths, up.split(sizes), strict=True):
            self.changes[path] = scaling * rows @ down

    def save(self, path: Path, metadata: Mapping[str, Any] | None = None) -> Path:
        """Write the file; ``metadata`` as Diffusers writes it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {"format": "pt"}
        if metadata is not None:
            header["lora_adapter_metadata"] = json.dumps(metadata)
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, path, metadata=header)
        return path


def authors_adapter(
    model: nn.Module,
    seed: int,
    *,
    kohya: bool,
    alpha: float | None,
    rank: int = 4,
    prefix: str = "diffusion_model.",
    parts: tuple[str, str] = (".lora_down.weight", ".lora_up.weight"),
    without: tuple[str, ...] = (),
) -> Adapter:
    """An adapter with the authors' module names: Kohya's underscores, or ComfyUI's dots."""
    adapter = Adapter(model, seed)
    for name, targets in AUTHORS_NAMES.items():
        for index in range(2):
            paths = tuple(target.format(i=index) for target in targets)
            spelled = name.format(i=index)
            spelled = "lora_unet_" + spelled.replace(".", "_") if kohya else prefix + spelled
            if not name.startswith(without or ("-",)):
                adapter.add(paths, spelled, rank=rank, alpha=alpha, parts=parts)
    return adapter


def diffusers_adapter(
    model: nn.Module,
    seed: int,
    *,
    scaling: float = 1.0,
    rank: int = 4,
    prefix: str = "transformer.",
    parts: tuple[str, str] = (".lora_A.weight", ".lora_B.weight"),
) -> Adapter:
    """An adapter on every attention and feed-forward linear, with Diffusers' names."""
    adapter = Adapter(model, seed)
    for path in adapter.linears:
        if "attn." in path or "ff." in path or "proj_mlp" in path:
            adapter.add((path,), prefix + path, rank=rank, scaling=scaling, parts=parts)
    return adapter
