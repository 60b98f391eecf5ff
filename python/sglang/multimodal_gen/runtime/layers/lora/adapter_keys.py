"""The names of tensors in adapter files, of every style that trainers and interfaces write.

=====================  ============================================================
style                  example (X a module's dotted path, X_ the same with underscores)
=====================  ============================================================
Diffusers              ``transformer.X.lora_A.weight``, ``text_encoder.X.lora_B.weight``
Diffusers, older       ``transformer.X.lora.down.weight``, ``X.lora_linear_layer.up.weight``
PEFT                   ``base_model.model.X.lora_A.weight``, ``...lora_A.default.weight``
Kohya                  ``lora_unet_X_.lora_down.weight``, ``lora_te1_X_.alpha``
ComfyUI, the authors'  ``diffusion_model.X.lora_down.weight``, ``X.lora_A.weight``
XLabs                  ``X.processor.qkv_lora.down.weight``
=====================  ============================================================

What X is called differs too: see `module_index`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sglang.multimodal_gen.runtime.utils.component_roles import DENOISER

Part = Literal["down", "up", "alpha"]

EVERY_DENOISER = ""
"""Component of names that say none: the file was made for a model with one denoiser."""

_PARTS: tuple[tuple[re.Pattern[str], Part], ...] = (
    (re.compile(r"\.lora_A(\.\w+)?\.weight$"), "down"),
    (re.compile(r"\.lora_B(\.\w+)?\.weight$"), "up"),
    (re.compile(r"\.lora_down\.weight$"), "down"),
    (re.compile(r"\.lora_up\.weight$"), "up"),
    (re.compile(r"\.lora(_linear_layer)?\.down\.weight$"), "down"),
    (re.compile(r"\.lora(_linear_layer)?\.up\.weight$"), "up"),
    (re.compile(r"(?<=lora)(?<!\.lora)\.down\.weight$"), "down"),
    (re.compile(r"(?<=lora)(?<!\.lora)\.up\.weight$"), "up"),
    (re.compile(r"(?<=lora[12])\.down\.weight$"), "down"),
    (re.compile(r"(?<=lora[12])\.up\.weight$"), "up"),
    (re.compile(r"\.alpha$"), "alpha"),
)

_PREFIXES: tuple[tuple[str, str, str], ...] = (
    ("lora_unet_", EVERY_DENOISER, "kohya"),
    ("lora_transformer_", EVERY_DENOISER, "kohya"),
    ("lora_te1_", "text_encoder", "kohya"),
    ("lora_te2_", "text_encoder_2", "kohya"),
    ("lora_te3_", "text_encoder_3", "kohya"),
    ("lora_te_", "text_encoder", "kohya"),
    ("model.diffusion_model.", EVERY_DENOISER, "comfy"),
    ("diffusion_model.", EVERY_DENOISER, "comfy"),
    ("transformer_2.", "transformer_2", "diffusers"),
    ("transformer.", DENOISER, "diffusers"),
    ("unet.", DENOISER, "diffusers"),
    ("text_encoders.clip_l.transformer.", "text_encoder", "comfy"),
    ("text_encoders.t5xxl.transformer.", "text_encoder_2", "comfy"),
    ("text_encoder_2.", "text_encoder_2", "diffusers"),
    ("text_encoder_3.", "text_encoder_3", "diffusers"),
    ("text_encoder.", "text_encoder", "diffusers"),
)

_OTHER_TYPES: tuple[tuple[str, str], ...] = (
    (r"\.lokr_", "LoKr"),
    (r"\.hada_", "LoHa"),
    (r"\.dora_scale$|\.lora_magnitude_vector", "DoRA"),
    (r"\.oft_|\.oft_blocks", "OFT"),
    (r"\.boft_", "BOFT"),
    (r"\.lora_mid\.", "LoCon with a Tucker core"),
    (r"\.ia3_", "IA3"),
    (r"\.glora_", "GLoRA"),
)


@dataclass(frozen=True, slots=True)
class AdapterKey:
    """A tensor's name, read: one part of the change of one module of one component.

    ``component`` is empty where the name tells none (`EVERY_DENOISER`);
    ``module`` is as the file spells it, dotted or (Kohya) with underscores.
    """

    component: str
    module: str
    part: Part
    style: str


def parse_adapter_key(name: str) -> AdapterKey | None:
    """What a tensor's name says; None for names of another kind (biases, differences, norms)."""
    for pattern, part in _PARTS:
        if match := pattern.search(name):
            component, module, style = _component(name[: match.start()])
            return AdapterKey(component, module, part, style)
    return None


def other_adapter_type(names: Iterable[str]) -> str | None:
    """The name of the adapter method that a file's names show, if it is not plain LoRA."""
    for name in names:
        for pattern, kind in _OTHER_TYPES:
            if re.search(pattern, name):
                return kind
    return None


def _component(stem: str) -> tuple[str, str, str]:
    style = "plain"
    if stem.startswith("base_model.model."):  # may wrap any of the others
        stem, style = stem.removeprefix("base_model.model."), "peft"
    for prefix, component, found in _PREFIXES:
        if stem.startswith(prefix):
            return component, stem.removeprefix(prefix), found if style == "plain" else style
    return EVERY_DENOISER, stem, style
