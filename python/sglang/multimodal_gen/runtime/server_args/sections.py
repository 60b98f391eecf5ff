"""The sections of the server arguments: frozen values, one owner for each.

A field is the flag: its name, type, default and help are all there is to say (see :mod:`flags`).
``__post_init__`` checks and raises InvalidArgument; it reads nothing outside the record. What
depends on the machine is decided in :mod:`resolve`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sglang.multimodal_gen.runtime.server_args.flags import check_fields, flag
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

Device = Literal["auto", "cpu", "cuda"]
Backend = Literal["auto", "sglang", "diffusers"]
LoRAMergeMode = Literal["auto", "merge", "dynamic"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArgs:
    """Which model, from where, and in which precision."""

    model_path: str = flag(
        "demo", help="A bundled model's name, a local folder, or a Hugging Face id."
    )
    revision: str | None = flag(
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
        "merges unless the weights' precision would lose most of it.",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for path in self.lora_paths:
            _refuse_blank("lora_path", path)
        for name in self.lora_nicknames:
            _refuse_blank("lora_nickname", name)
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
    if not value.strip() or "\0" in value:
        raise InvalidArgument(field, value, "must not be blank. Leave it out for the default.")
