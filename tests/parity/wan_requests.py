"""Tiny Wan checkpoints for tests of mechanisms, and one request for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

from parity.tiny_wan import TinyWan

TEXT = TinyWan("wan")
EXPERTS = TinyWan("wan-2.2", experts=True)
SMALL = TinyWan("wan-5b", image="first")
IMAGE = TinyWan("wan-clip", image="clip")
PLAIN: dict[str, Any] = {
    "prompt": "a small red circle above the fox",
    "negative_prompt": "blue square",
    "seed": 5,
    "height": 64,
    "width": 48,
    "num_frames": 9,
    "num_inference_steps": 2,
    "guidance_scale": 3.0,
}


def first_frame(folder: Path) -> str:
    """A picture with something in every corner."""
    path = folder / "first-frame.png"
    if not path.exists():
        ramp = Image.linear_gradient("L").resize((70, 90))
        Image.merge("RGB", (ramp, ramp.transpose(Image.Transpose.ROTATE_180), ramp)).save(path)
    return str(path)


def request(checkpoint: TinyWan, folder: Path, **changes: Any) -> dict[str, Any]:
    """A request that the checkpoint takes, with an image where it takes one."""
    values = {**PLAIN, **changes}
    if checkpoint.image == "first":
        values["width"] = 64
    if checkpoint.image:
        values["image_path"] = first_frame(folder)
    if checkpoint.experts:
        values["guidance_scale_2"] = 2.0
    return values
