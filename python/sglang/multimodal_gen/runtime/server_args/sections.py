"""The sections of the server arguments: frozen values, one owner for each.

A field is the flag: its name, type, default and help are all there is to say (see :mod:`flags`).
``__post_init__`` checks and raises InvalidArgument; it reads nothing outside the record. What
depends on the machine is decided in :mod:`resolve`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sglang.multimodal_gen.configs.lora_choice import nickname_problem
from sglang.multimodal_gen.runtime.server_args.flags import check_fields, flag
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument
from sglang.multimodal_gen.runtime.utils.precision import PRECISIONS

Device = Literal["auto", "cpu", "cuda"]
Backend = Literal["auto", "sglang", "diffusers"]
LoRAMergeMode = Literal["auto", "merge", "dynamic"]
QuantizationName = Literal["fp8", "fp8-tensor"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArgs:
    """Which model, from where, and in which precision."""

    model_path: str = flag(
        "demo", help="A bundled model's name, a local folder, or a Hugging Face id."
    )
    revision: str | None = flag(None, help="Branch, tag or commit of a Hugging Face id.")
    model_id: str | None = flag(
        None,
        help="Serve the model as this registered id ('sglang models' lists them), whatever its "
        "path and files say.",
    )
    pipeline_class_name: str | None = flag(
        None,
        name="--pipeline",
        aliases=("--pipeline-class-name",),
        help="Serve the model with this registered pipeline. With it, --model-path may be one "
        ".safetensors file: the weights of the pipeline's transformer.",
    )
    backend: Backend = flag(
        "auto",
        help="What runs the model: 'sglang' is a native family, 'diffusers' the pipeline of that "
        "library; 'auto' is the family, and Diffusers where there is none.",
    )
    precision: str = flag(
        "auto",
        choices=("auto", "config", *PRECISIONS),
        help="Floating-point type of the weights. 'config' is what the model's pipeline config "
        "says; 'auto' is that on a GPU and fp32 on a CPU.",
    )
    component_paths: Mapping[str, str] = flag(
        default_factory=dict,
        help="Load component NAME (vae, transformer, ...) from another local folder.",
    )
    component_weights_paths: Mapping[str, str] = flag(
        default_factory=dict,
        help="Take the weights of component NAME from another local safetensors file, index file "
        "or folder; its config stays.",
    )
    component_precisions: Mapping[str, str] = flag(
        default_factory=dict,
        choices=PRECISIONS,
        help="Precision of component NAME alone; wins over --precision.",
    )
    quantization: QuantizationName | None = flag(
        None,
        help="Hold the denoisers' linears in eight bits (e4m3), quantised as they load, and "
        "quantise what they read as it comes: 'fp8' with a scale for each row, 'fp8-tensor' with "
        "one for each tensor. Checkpoints that store fp8 weights with scales need no flag.",
    )
    quantization_ignored_layers: tuple[str, ...] = flag(
        (),
        help="Linears that stay unquantised, by patterns of their paths ('*.ff.*'), beside those "
        "that the model's pipeline config names.",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        _refuse_blank("model_path", self.model_path)
        for field in ("revision", "model_id", "pipeline_class_name"):
            if getattr(self, field) is not None:
                _refuse_blank(field, getattr(self, field))
        for field in ("component_paths", "component_weights_paths"):
            for name, path in getattr(self, field).items():
                _refuse_blank(f"{field}.{name}", path)
        for pattern in self.quantization_ignored_layers:
            _refuse_blank("quantization_ignored_layers", pattern)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlatformArgs:
    """Where the work runs."""

    device: Device = flag("auto", help="Where to run; 'auto' is a GPU where there is one.")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchingArgs:
    """How much is denoised together."""

    batching_max_size: int = flag(
        4, help="Images denoised together at most. Less needs less memory."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.batching_max_size < 1:
            problem = "must be at least 1. 1 makes one image at a time."
            raise InvalidArgument("batching_max_size", self.batching_max_size, problem)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRAArgs:
    """Adapters that are in force from the start, where a request does not choose its own."""

    lora_path: str | tuple[str, ...] | None = flag(
        None,
        help="LoRA to load and put in force at start-up: files, folders with one, or hub ids "
        "(org/name, org/name:FILE).",
    )
    lora_nickname: str | tuple[str, ...] = flag(
        "default", help="The name(s) by which requests and calls know them; one for each path."
    )
    lora_scale: float | tuple[float, ...] = flag(
        1.0, help="Their weight(s): one for all, or one for each path. 0 only loads them."
    )
    lora_merge_mode: LoRAMergeMode = flag(
        "auto",
        help="'merge' puts them into the weights, 'dynamic' adds them in each forward; 'auto' "
        "merges unless the weights' precision would lose most of it (with Diffusers: 'dynamic').",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for path in self.lora_paths:
            _refuse_blank("lora_path", path)
        for name in self.lora_nicknames:
            if (problem := nickname_problem(name)) is not None:
                raise InvalidArgument("lora_nickname", name, problem)
        paths, names, scales = self.lora_paths, self.lora_nicknames, self.lora_scales
        if paths and len(names) != len(paths):
            problem = f"has {len(names)} names for {len(paths)} paths. Give one for each."
            raise InvalidArgument("lora_nickname", self.lora_nickname, problem)
        if len(set(names)) != len(names):
            raise InvalidArgument("lora_nickname", self.lora_nickname, "names must differ.")
        if paths and len(scales) != len(paths):
            problem = (
                f"has {len(scales)} weights for {len(paths)} paths. Give one, or one for each."
            )
            raise InvalidArgument("lora_scale", self.lora_scale, problem)

    @property
    def lora_paths(self) -> tuple[str, ...]:
        """The paths as a tuple."""
        if self.lora_path is None:
            return ()
        return (self.lora_path,) if isinstance(self.lora_path, str) else tuple(self.lora_path)

    @property
    def lora_nicknames(self) -> tuple[str, ...]:
        """The names as a tuple."""
        names = self.lora_nickname
        return (names,) if isinstance(names, str) else tuple(names)

    @property
    def lora_scales(self) -> tuple[float, ...]:
        """The weights, one for each path."""
        if isinstance(self.lora_scale, (int, float)):
            return (float(self.lora_scale),) * len(self.lora_paths)
        return tuple(self.lora_scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObserveArgs:
    """What the runtime tells about itself."""

    log_level: LogLevel = flag("warning", help="The least severe log message to print.")
    check_stages: bool = flag(
        False,
        help="Refuse a stage's access to a field that it does not declare. For porters; slower.",
    )

    def __post_init__(self) -> None:
        check_fields(self)


def _refuse_blank(field: str, value: str) -> None:
    if "\0" in value:
        raise InvalidArgument(field, value, "holds a NUL character, which no path or name has")
    if not value.strip():
        raise InvalidArgument(field, value, "must not be blank. Leave it out for the default.")
