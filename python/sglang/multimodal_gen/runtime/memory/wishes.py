"""What the memory flags say of each component of one pipeline; contradictions end here."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sglang.multimodal_gen.runtime.memory.plan import ComponentFacts, Residency, Wishes
from sglang.multimodal_gen.runtime.server_args.memory_args import MemoryArgs
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

GROUPS = ("dit", "text_encoder", "image_encoder", "vae")
"""What flags may name besides components: all components of one kind."""
_DEFAULT = ("text_encoder", "image_encoder", "vae")


def wishes_of(
    args: MemoryArgs, components: Sequence[ComponentFacts], others: Collection[str] = ()
) -> Wishes:
    """The modes that the flags ask for; components that none names are left open.

    ``others`` are components without weights, for the message. A group's name means all of it,
    also where one component has that name.

    Raises:
        InvalidArgument: a flag names what is not there or cannot be done, or two flags disagree.
    """
    said: dict[str, tuple[Residency, str]] = {}
    names = _Names(components, others)

    def say(field: str, chosen: Sequence[str], mode: Residency) -> None:
        for name in chosen:
            before = said.setdefault(name, (mode, field))
            if before[0] is not mode:
                problem = f"{name} would be {before[0].value} by {before[1]} and {mode.value} here"
                raise InvalidArgument(field, getattr(args, field), f"{problem}. Choose one")

    field = "layerwise_offload_components"
    for value in args.layerwise_offload_components:
        chosen = names.of(field, value)
        _require_streams(field, value, chosen, components)
        say(field, chosen, Residency.LAYERWISE)
    field = "cpu_offload_components"
    for value in args.cpu_offload_components:
        if value == "none":
            chosen = [facts.name for facts in components if facts.name not in said]
            say(field, chosen, Residency.RESIDENT)
        else:
            say(field, names.of(field, value), Residency.COMPONENT)
    for group in GROUPS:
        field = f"{group}_cpu_offload"
        wish = getattr(args, field)
        if wish is True:
            say(field, names.group(field, wish, group), Residency.COMPONENT)
        elif wish is False:
            members = [facts.name for facts in components if facts.group == group]
            by_layers = [n for n in members if said.get(n, ("",))[0] is Residency.LAYERWISE]
            say(field, [n for n in members if n not in by_layers], Residency.RESIDENT)
    if args.use_fsdp_inference:
        say("use_fsdp_inference", names.group(field, True, "dit"), Residency.RESIDENT)
    streamed = any(
        said.get(facts.name, ("",))[0] is Residency.LAYERWISE
        for facts in components
        if facts.group == "dit"
    )
    for field in ("dit_offload_prefetch_size", "dit_layerwise_resident_layers"):
        value = getattr(args, field)
        if value != 0 and not streamed:
            problem = "says how a denoiser is streamed; add --layerwise-offload-components dit"
            raise InvalidArgument(field, value, problem)
    return Wishes(
        modes={name: mode for name, (mode, _) in said.items()},
        prefetch_size=args.dit_offload_prefetch_size,
        resident_layers=args.dit_layerwise_resident_layers,
    )


class _Names:
    """Resolves what a flag names."""

    def __init__(self, components: Sequence[ComponentFacts], others: Collection[str]) -> None:
        self.components = components
        self.others = others

    def of(self, field: str, value: str) -> list[str]:
        """The components that one value of a list means."""
        if value == "all":
            return [facts.name for facts in self.components]
        if value == "default":
            return [facts.name for facts in self.components if facts.group in _DEFAULT]
        if value in GROUPS:
            return self.group(field, value, value)
        known = [facts.name for facts in self.components]
        if value in known:
            return [value]
        if value in self.others:
            raise InvalidArgument(field, value, "this component has no weights; leave it out")
        problem = (
            f"this pipeline has no such component.{did_you_mean(value, [*known, *GROUPS])} "
            f"It has: {', '.join(known)}"
        )
        raise InvalidArgument(field, value, problem)

    def group(self, field: str, value: object, group: str) -> list[str]:
        """All components of a kind, of which there must be some."""
        members = [facts.name for facts in self.components if facts.group == group]
        if not members:
            known = ", ".join(facts.name for facts in self.components)
            problem = f"this pipeline has no component of the kind {group!r}. It has: {known}"
            raise InvalidArgument(field, value, problem)
        return members


def _require_streams(
    field: str, value: str, chosen: Sequence[str], components: Sequence[ComponentFacts]
) -> None:
    cannot = [facts.name for facts in components if facts.name in chosen and not facts.streams]
    if cannot:
        can = [facts.name for facts in components if facts.streams]
        problem = (
            f"{', '.join(cannot)} cannot be streamed: the class lists no blocks "
            "(LayerwiseOffloadableModuleMixin, layer_names). Those that can: "
            f"{', '.join(can) or 'none'}; use cpu_offload_components for the others"
        )
        raise InvalidArgument(field, value, problem)
