"""The section on memory: what leaves the device while it is not used."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.multimodal_gen.runtime.server_args.flags import check_fields, flag
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

WHOLE_SETS = ("all", "none", "default")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryArgs:
    """Which components rest in host memory. What is left open is chosen from free memory when the
    model is found (`runtime/memory/plan.py`), and told in one sentence."""

    layerwise_offload_components: tuple[str, ...] = flag(
        (),
        aliases=("--layerwise-offload-modules",),
        help="Keep these in host memory and stream their blocks through a small ring on the GPU: "
        "'all', 'dit' (denoisers), 'default' (text and image encoders, VAE), or names.",
    )
    dit_offload_prefetch_size: float = flag(
        0.0,
        help="Blocks of a streamed denoiser that are fetched ahead: a count, or a share of its "
        "blocks below 1. 0 is one block.",
    )
    dit_layerwise_resident_layers: float = flag(
        0.0,
        help="Leading blocks of a streamed denoiser that stay on the GPU: a count, or a share of "
        "its blocks below 1.",
    )
    cpu_offload_components: tuple[str, ...] = flag(
        (),
        help="Keep these whole in host memory and bring each to the GPU for its stage: 'all', "
        "'none', 'dit', 'text_encoder', 'image_encoder', 'vae', or names.",
    )
    dit_cpu_offload: bool | None = flag(
        None, help="The same for denoisers alone; false keeps them on the GPU."
    )
    text_encoder_cpu_offload: bool | None = flag(
        None, help="The same for text encoders alone; false keeps them on the GPU."
    )
    image_encoder_cpu_offload: bool | None = flag(
        None, help="The same for image encoders alone; false keeps them on the GPU."
    )
    vae_cpu_offload: bool | None = flag(
        None, help="The same for the VAE alone; false keeps it on the GPU."
    )
    pin_cpu_memory: bool = flag(
        True,
        help="Lock host memory of offloaded weights in place, so that copies are fast and run "
        "beside the computation.",
    )
    use_fsdp_inference: bool = flag(
        False,
        help="Shard the denoiser's weights over the ranks that share a sequence; each block's are "
        "gathered when it runs.",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("layerwise_offload_components", "cpu_offload_components"):
            names = _split(getattr(self, name))
            object.__setattr__(self, name, names)
            if len(names) > 1 and (whole := {"all", "none"} & set(names)):
                problem = f"{whole.pop()!r} goes with nothing else"
                raise InvalidArgument(name, names, problem)
            if len(set(names)) != len(names):
                raise InvalidArgument(name, names, "names one component twice")
        if "none" in self.layerwise_offload_components:
            problem = "takes no 'none'; leave it out"
            raise InvalidArgument("layerwise_offload_components", "none", problem)
        for name in ("dit_offload_prefetch_size", "dit_layerwise_resident_layers"):
            value = getattr(self, name)
            if value < 0 or (value >= 1 and value != int(value)):
                problem = "must be a share from 0 to 1, or a whole number of blocks"
                raise InvalidArgument(name, value, problem)

    def first_set(self) -> tuple[str, object] | None:
        """A field that was set, for those that can honour none; None if all are defaults."""
        plain = MemoryArgs()
        for name in self.__slots__:
            if getattr(self, name) != getattr(plain, name):
                return name, getattr(self, name)
        return None


def _split(names: tuple[str, ...]) -> tuple[str, ...]:
    """``("dit,vae",)`` is ``("dit", "vae")``: both spellings are in use."""
    return tuple(part.strip() for name in names for part in name.split(",") if part.strip())
