"""What the harness must know about Wan's pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PIL import Image, ImageOps

from sglang.multimodal_gen.runtime.utils.image_file import load_input_image
from sglang.multimodal_gen.runtime.utils.video_file import load_input_video

from parity.family import Family, another_text

INPUTS = ("hidden_states", "timestep", "encoder_hidden_states", "encoder_hidden_states_image")


def _another_file(path: Any) -> Any:
    """A file beside it with other content: tests write each picture and clip twice."""
    if isinstance(path, list):
        return [_another_file(one) for one in path]
    return path.replace("given-", "other-")


OTHER: dict[str, Callable[[Any], Any]] = {
    "prompt": another_text,
    "seed": lambda seed: seed + 1000,
    "guidance_scale": lambda scale: 2 * scale + 1,
    "negative_prompt": another_text,
    "guidance_scale_2": lambda scale: 2 * scale + 3,
    "flow_shift": lambda shift: shift + 3,
    "strength": lambda strength: strength / 2,
    "image_path": _another_file,
    "video_path": _another_file,
}


def arguments(pipeline: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Files opened, and the schedule's shift where it belongs."""
    settings = dict(settings)
    paths = settings.pop("image_path", None)
    if paths is not None:
        paths = [paths] if isinstance(paths, str) else paths
        images = [load_input_image(path) for path in paths]
        settings |= dict(zip(("image", "last_image"), images, strict=False))
    video = settings.pop("video_path", None)
    if video is not None:
        frames = load_input_video(video).frames[: settings.pop("num_frames")]
        settings["video"] = [Image.fromarray(frame) for frame in frames]
    if "num_images_per_prompt" in settings:
        settings["num_videos_per_prompt"] = settings.pop("num_images_per_prompt")
    _shift(pipeline, settings.pop("flow_shift", None))
    return settings


def _shift(pipeline: Any, shift: float | None) -> None:
    """The shift that was asked for, or the checkpoint's: a reference is used for several cases."""
    scheduler = pipeline.scheduler
    name = "flow_shift" if "flow_shift" in scheduler.config else "shift"
    original = getattr(pipeline, "_original_shift", scheduler.config[name])
    pipeline._original_shift = original
    value = original if shift is None else shift
    pipeline.scheduler = type(scheduler).from_config(scheduler.config, **{name: value})


def _wan(reference: str = "WanPipeline", channels: int = 6, **more: Any) -> Family:
    return Family(
        reference=reference,
        inputs=more.pop("inputs", INPUTS),
        latents_of=more.pop("latents_of", lambda inputs: inputs["hidden_states"][:, :channels]),
        other=OTHER,
        clips=True,
        guidance="guidance_scale",
        arguments=arguments,
        **more,
    )


TEXT = _wan()
EXPERTS = _wan(denoisers=("transformer", "transformer_2"))
VIDEO = _wan("WanVideoToVideoPipeline")
IMAGE = _wan("WanImageToVideoPipeline")
IMAGE_EXPERTS = _wan("WanImageToVideoPipeline", denoisers=EXPERTS.denoisers)
# The 5B's reference spells one time out for all tokens of a clip without a given frame.
SMALL_TEXT = _wan(channels=8, inputs=tuple(name for name in INPUTS if name != "timestep"))
SMALL_IMAGE = _wan(
    "WanImageToVideoPipeline",
    latents_of=lambda inputs: inputs["hidden_states"][:, :, 1:],
    own_inputs={"timestep": "token_timestep"},
)


def mirrored(image: Image.Image) -> Image.Image:
    """Another picture."""
    return ImageOps.invert(ImageOps.mirror(image))
