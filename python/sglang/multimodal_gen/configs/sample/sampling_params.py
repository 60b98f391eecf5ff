"""What a caller may set for one request."""

from __future__ import annotations

import math
import os
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, ClassVar, Self

from sglang.multimodal_gen.configs.lora_choice import LoRAChoice, parse_lora_choices
from sglang.multimodal_gen.configs.sealed import Sealable
from sglang.multimodal_gen.configs.step_cache_choice import METHODS, OFF, threshold_problem
from sglang.multimodal_gen.configs.task_type import DataType, ModelTaskType
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

MAX_INFERENCE_STEPS = 1000  # the training grid of every scheduler in use has a thousand steps
MAX_GUIDANCE = 1000.0
MAX_OUTPUTS = 1000
MAX_COUNT = 2**20
MAX_FRAMES = 100_000
MAX_FPS = 240
MAX_SEED = 2**63 - 1
MAX_PROMPT_CHARACTERS = 100_000
RANDOM_SEED = -1


def setting(default: Any, help: str, **metadata: Any) -> Any:
    """A field of a request: its default, and what ``--help`` says of it."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass
class SamplingParams(Sealable):
    """The settings of one request that every family shares.

    A family subclasses this (or `ImageSamplingParams`, `VideoSamplingParams`) as a plain dataclass
    with its own defaults and, where users can set more, its own fields. Unset optional values are
    None; 0 is a value.

    Raises:
        InvalidRequest: on construction, for a value outside its range; names field and value.
    """

    data_type: ClassVar[DataType] = DataType.VIDEO
    prompt_optional: ClassVar[bool] = False

    prompt: str | list[str] | None = setting(None, "What to make; several give several outputs.")
    negative_prompt: str | None = setting(
        None, "What to keep away from; takes effect when classifier-free guidance is on."
    )
    seed: int | list[int] | None = setting(
        None, "Seed of the first output; output k uses seed + k. Left out or -1: drawn at random."
    )
    num_outputs_per_prompt: int = setting(1, "Outputs for each prompt.")
    height: int | None = setting(None, "Height in pixels.")
    width: int | None = setting(None, "Width in pixels.")
    num_inference_steps: int = setting(50, "Denoising steps.")
    guidance_scale: float = setting(1.0, "Guidance strength as the model was trained to take it.")
    true_cfg_scale: float | None = setting(
        None, "Classifier-free guidance with a second forward on the negative prompt; on above 1."
    )
    max_sequence_length: int | None = setting(None, "Text tokens that the prompt is padded to.")
    task_type: ModelTaskType | str | None = setting(
        None, "Task, for models that serve several (e.g. T2I).", choices=tuple(ModelTaskType)
    )
    step_cache: str | None = setting(
        None,
        "Leave out the denoiser's blocks at steps that change little: by what its first block "
        "contributes, or TeaCache, by that block's input. Left out: as the server was started.",
        choices=(OFF, *METHODS),
    )
    step_cache_threshold: float | None = setting(
        None, "Relative change from which blocks are computed again; more skips more. 0 skips none."
    )

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Refuse values that no model can serve. Families may extend this."""
        for prompt in self.prompts:
            _check_text("prompt", prompt)
        if self.negative_prompt is not None:
            _check_text("negative_prompt", self.negative_prompt)
        _check_seed(self.seed)
        check_number("num_outputs_per_prompt", self.num_outputs_per_prompt, int, low=1,
                      high=MAX_OUTPUTS)  # fmt: skip
        if not self._left_to_pipeline("num_inference_steps"):
            check_number("num_inference_steps", self.num_inference_steps, int, low=1,
                          high=MAX_INFERENCE_STEPS)  # fmt: skip
        if not self._left_to_pipeline("guidance_scale"):
            check_number("guidance_scale", self.guidance_scale, float, low=0, high=MAX_GUIDANCE)
        for name in ("height", "width", "max_sequence_length"):
            _check_optional(name, getattr(self, name), int, low=1, high=MAX_COUNT)
        _check_optional("true_cfg_scale", self.true_cfg_scale, float, low=0, high=MAX_GUIDANCE)
        self._check_step_cache()
        if self.task_type is not None:
            try:
                ModelTaskType.parse(self.task_type)
            except ValueError as error:
                raise InvalidRequest("task_type", self.task_type, str(error)) from None

    def _check_step_cache(self) -> None:
        wish, threshold = self.step_cache, self.step_cache_threshold
        if wish is not None and wish not in (OFF, *METHODS):
            problem = f"must be one of: {', '.join((OFF, *METHODS))}"
            raise InvalidRequest("step_cache", wish, problem)
        if threshold is None:
            return
        if (problem := threshold_problem(threshold)) is not None:
            raise InvalidRequest("step_cache_threshold", threshold, problem)
        if wish == OFF:
            problem = "has no effect with step_cache=off; leave one of them out"
            raise InvalidRequest("step_cache_threshold", threshold, problem)

    def _left_to_pipeline(self, name: str) -> bool:
        """Whether a number is left out, in a class whose default for it is to leave it out."""
        return getattr(self, name) is None and getattr(type(self), name) is None

    @property
    def image_paths(self) -> list[str]:
        """The paths of input images; families that take some have a field for them."""
        return []

    @property
    def video_paths(self) -> list[str]:
        """The paths of input videos: of the field ``video_path``, where a family declares one."""
        return _as_list(getattr(self, "video_path", None))

    @property
    def lora_choices(self) -> tuple[LoRAChoice, ...] | None:
        """The adapters asked for; None leaves them to the server. Families with a field for it."""
        return None

    @property
    def prompts(self) -> list[str]:
        """The prompts as a list; empty when none was given."""
        return _as_list(self.prompt)

    @classmethod
    def field_names(cls) -> list[str]:
        """The names a request may use, in order."""
        return [f.name for f in fields(cls)]

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Build from names and values.

        Raises:
            InvalidRequest: a name is unknown (the nearest one is offered) or a value is refused.
        """
        known = cls.field_names()
        for name, value in values.items():
            if name not in known:
                raise InvalidRequest(
                    name,
                    value,
                    f"unknown sampling field.{did_you_mean(name, known)} "
                    f"{cls.__name__} takes: {', '.join(known)}",
                )
        return cls(**values)


@dataclass
class VisualSamplingParams(SamplingParams):
    """What requests for images and for videos have in common beyond the basics."""

    image_path: str | list[str] | None = setting(None, "Input image(s), for models that take them.")
    lora: list[str] | None = setting(
        None,
        "LoRA adapters for this request alone, in place of the server's: NAME or a file's path, "
        "with =WEIGHT after it if not 1.",
    )

    def check(self) -> None:
        """The shared checks, and that image paths are paths and adapters have weights."""
        super().check()
        parse_lora_choices(self.lora)
        for path in self.image_paths:
            if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
                raise InvalidRequest("image_path", path, "must be the path of an image file")

    @property
    def image_paths(self) -> list[str]:
        """The paths of the input images, in order; empty when there are none."""
        return _as_list(self.image_path)

    @property
    def lora_choices(self) -> tuple[LoRAChoice, ...] | None:
        """The adapters asked for, which may also be mappings: ``{"name": ..., "weight": ...}``."""
        return parse_lora_choices(self.lora)


@dataclass
class ImageSamplingParams(VisualSamplingParams):
    """The settings of a request for images."""

    data_type: ClassVar[DataType] = DataType.IMAGE


@dataclass
class VideoSamplingParams(VisualSamplingParams):
    """The settings of a request for videos.

    Which counts of frames a model can make is its pipeline config's to say (`frame_multiple`);
    admission refuses others, or rounds them down where ``num_frames_round_down`` asks for it.
    """

    data_type: ClassVar[DataType] = DataType.VIDEO

    num_frames: int = setting(81, "Frames of each clip.")
    num_frames_round_down: bool = setting(
        False, "Make the next smaller count of frames that the model can, in place of refusing."
    )
    fps: int = setting(24, "Frames a second: how fast the clip plays, not how long it is.")
    video_path: str | list[str] | None = setting(None, "Input video(s), for models that take them.")

    def check(self) -> None:
        """The checks of images, and that frames and their rate are counts."""
        super().check()
        check_number("num_frames", self.num_frames, int, low=1, high=MAX_FRAMES)
        check_number("fps", self.fps, int, low=1, high=MAX_FPS)
        if not isinstance(self.num_frames_round_down, bool):
            problem = "must be true or false"
            raise InvalidRequest("num_frames_round_down", self.num_frames_round_down, problem)
        for path in self.video_paths:
            if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
                raise InvalidRequest("video_path", path, "must be the path of a video file")


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: white space, control and zero-width characters only."""
    return all(c.isspace() or unicodedata.category(c) in ("Cc", "Cf") for c in text)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(name, text, f"must be text, not {type(text).__name__}")
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise InvalidRequest(
            name, text, f"has {len(text)} characters; at most {MAX_PROMPT_CHARACTERS} are taken"
        )
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise InvalidRequest(name, text, "holds half of a surrogate pair; send valid Unicode")


def _check_seed(seed: Any) -> None:
    seeds = seed if isinstance(seed, (list, tuple)) else [seed]
    if not seeds:
        raise InvalidRequest("seed", seed, "an empty list; leave seed out for random ones")
    for value in seeds:
        if value is None and seed is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise InvalidRequest("seed", seed, "must be a whole number, or a list of them")
        if value != RANDOM_SEED and not 0 <= int(value) <= MAX_SEED:
            raise InvalidRequest("seed", seed, f"must lie in 0..{MAX_SEED}, or be -1 for random")


def _check_optional(name: str, value: object, kind: type, **bounds: float) -> None:
    if value is not None:
        check_number(name, value, kind, **bounds)


def check_number(name: str, value: Any, kind: type, *, low: float, high: float = math.inf) -> None:
    """Refuse (`InvalidRequest`) what is no number of a kind, int or float, within bounds."""
    whole = kind is int
    allowed: Any = Integral if whole else Real  # numpy's numbers too
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise InvalidRequest(name, value, f"must be a {'whole ' if whole else ''}number")
    if value != value:
        raise InvalidRequest(name, value, "must be a number")
    if value < low:
        raise InvalidRequest(name, value, f"must be at least {low}")
    if value > high or value == math.inf:
        bound = "finite" if high == math.inf else f"at most {high}"
        raise InvalidRequest(name, value, f"must be {bound}")
