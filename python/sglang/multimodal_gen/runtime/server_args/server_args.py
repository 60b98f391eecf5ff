"""ServerArgs: everything that is decided before a model loads, as one frozen value."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self, cast

from sglang.multimodal_gen.runtime.server_args.flags import Flag, flags_of
from sglang.multimodal_gen.runtime.server_args.memory_args import MemoryArgs
from sglang.multimodal_gen.runtime.server_args.parallel_args import ParallelArgs
from sglang.multimodal_gen.runtime.server_args.sections import (
    BatchingArgs,
    LoRAArgs,
    ModelArgs,
    ObserveArgs,
    PlatformArgs,
)
from sglang.multimodal_gen.runtime.server_args.speed_section import SpeedArgs
from sglang.multimodal_gen.runtime.server_args.vae_section import VAEArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

if TYPE_CHECKING:
    from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerArgs:
    """The arguments of one running model, in sections; users see them flat.

    Nobody changes them after :func:`resolve.resolve`: a variant is made with
    ``dataclasses.replace``. ``pipeline_config`` is no flag; it is put in when the pipeline is built
    from a checkpoint.
    """

    model: ModelArgs = field(default_factory=ModelArgs)
    platform: PlatformArgs = field(default_factory=PlatformArgs)
    parallel: ParallelArgs = field(default_factory=ParallelArgs)

    memory: MemoryArgs = field(default_factory=MemoryArgs)
    batching: BatchingArgs = field(default_factory=BatchingArgs)
    lora: LoRAArgs = field(default_factory=LoRAArgs)
    vae: VAEArgs = field(default_factory=VAEArgs)
    speed: SpeedArgs = field(default_factory=SpeedArgs)
    observe: ObserveArgs = field(default_factory=ObserveArgs)
    pipeline_config: PipelineConfig | None = None

    @classmethod
    def from_flat(cls, *, pipeline_config: PipelineConfig | None = None, **values: object) -> Self:
        """Arguments from flat names: ``from_flat(model_path="demo", device="cpu")``.

        Raises InvalidArgument for an unknown name and for a value that its section refuses.
        """
        known = {spec.name: (section, spec) for section, spec in _leaves(cls)}
        parts: dict[str, dict[str, object]] = {section: {} for section in _sections(cls)}
        for name, value in values.items():
            if name not in known:
                problem = f"there is no such server argument.{did_you_mean(name, known)}"
                raise InvalidArgument(name, value, problem)
            section, spec = known[name]
            parts[section][name] = spec.accept(value)
        built = {name: _sections(cls)[name](**part) for name, part in parts.items()}
        return cls(**built, pipeline_config=pipeline_config)

    def to_flat(self) -> dict[str, Any]:
        """All flags' values by flat name; ``from_flat(**args.to_flat())`` equals ``args``."""
        return {
            spec.name: getattr(getattr(self, section), spec.name)
            for section, spec in _leaves(type(self))
        }


def server_flags() -> tuple[Flag, ...]:
    """The flags of ServerArgs, section by section."""
    return tuple(spec for _, spec in _leaves(ServerArgs))


def _sections(cls: type[ServerArgs]) -> dict[str, type]:
    """The fields that are sections: those whose default is made by the section's class."""
    made = {f.name: f.default_factory for f in fields(cls) if f.default_factory is not MISSING}
    return cast("dict[str, type]", made)


def _leaves(cls: type[ServerArgs]) -> list[tuple[str, Flag]]:
    return [(name, spec) for name, section in _sections(cls).items() for spec in flags_of(section)]
