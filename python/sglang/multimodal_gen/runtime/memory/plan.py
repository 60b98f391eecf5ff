"""Which component lives where: a pure function of sizes, free memory and wishes.

A component is *resident* (on the device for good), offloaded *whole* (in host memory, brought to
the device for its stage) or *by layers* (its blocks take turns in a small ring). The plan that
moves the fewest bytes for a request is chosen among all that fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from sglang.multimodal_gen.runtime.platforms.memory import MemoryFacts
from sglang.multimodal_gen.runtime.utils.errors import OutOfMemory

GIB = 1 << 30

# Device memory kept for activations, or a tenth of the device where that is more. FLUX.1 at
# 1024x1024 takes about 1 GiB in the denoiser and 3 in its VAE.
ACTIVATION_RESERVE = 4 * GIB
HOST_RESERVE = GIB
"""Host memory kept for everything that is not weights."""
STEPS = 28
"""Forwards of a denoiser in a typical request: what streaming it by layers is multiplied with."""


class Residency(Enum):
    """Where a component's weights live between uses, and how they come to the device."""

    RESIDENT = "resident"
    COMPONENT = "component-offload"
    LAYERWISE = "layerwise-offload"


@dataclass(frozen=True, slots=True)
class ComponentFacts:
    """What is known of a component before it loads.

    ``nbytes`` of all its weights as this rank will hold them; ``group`` is ``dit``,
    ``text_encoder``, ``image_encoder``, ``vae`` or another role: components of one group are used
    by one stage, at once but for those that take turns. ``streams`` tells whether its class lists
    blocks, ``blocks`` their sizes in running order (empty where they are not known before loading).
    """

    name: str
    group: str
    nbytes: int
    blocks: tuple[int, ...] = ()
    streams: bool = False
    takes_turns: bool = False

    def slots(self, prefetch_size: float) -> int:
        """Buffers of the ring: one to compute from, the others to fill."""
        ahead = 1
        if prefetch_size >= 1:
            ahead = int(prefetch_size)
        elif prefetch_size > 0:
            ahead = max(math.ceil(prefetch_size * len(self.blocks)), 1)
        return ahead + 1

    def layers(self, size: float) -> int:
        """How many leading blocks a number means: a share below one, else a count."""
        count = round(size * len(self.blocks)) if size < 1 else int(size)
        return min(count, len(self.blocks))


@dataclass(frozen=True, slots=True)
class Placement:
    """One component's place: ``slots`` buffers in its ring, ``resident_layers`` leading blocks that
    stay on the device."""

    mode: Residency = Residency.RESIDENT
    slots: int = 2
    resident_layers: int = 0

    def always(self, facts: ComponentFacts) -> int:
        """Device bytes for good."""
        if self.mode is Residency.RESIDENT:
            return facts.nbytes
        return sum(facts.blocks[: self.resident_layers])

    def in_use(self, facts: ComponentFacts) -> int:
        """Further device bytes while a stage uses it."""
        if self.mode is Residency.RESIDENT:
            return 0
        if self.mode is Residency.COMPONENT or not facts.blocks:
            return facts.nbytes
        streamed = facts.blocks[self.resident_layers :]
        ring = min(self.slots, len(streamed)) * max(streamed, default=0)
        return facts.nbytes - sum(facts.blocks) + ring

    def in_host(self, facts: ComponentFacts) -> int:
        """Host bytes for good."""
        return 0 if self.mode is Residency.RESIDENT else facts.nbytes - self.always(facts)

    def moved(self, facts: ComponentFacts) -> int:
        """Bytes that travel for one typical request."""
        if self.mode is Residency.LAYERWISE and facts.group == "dit":
            return STEPS * self.in_host(facts)
        return self.in_host(facts)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user said: a mode for some components, and how to stream denoisers."""

    modes: Mapping[str, Residency] = field(default_factory=dict)
    prefetch_size: float = 0.0
    resident_layers: float = 0.0


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """Where each component goes. ``device_bytes`` and ``host_bytes`` are what the weights take at
    most; ``overlap``: there is room to bring the next stage's components meanwhile; ``sharded``
    components spread over ranks; ``note`` is the one sentence that explains it, None where nothing
    was chosen."""

    placements: Mapping[str, Placement] = field(default_factory=dict)
    overlap: bool = False
    device_bytes: int = 0
    host_bytes: int = 0
    sharded: frozenset[str] = frozenset()
    note: str | None = None

    def __getitem__(self, name: str) -> Placement:
        return self.placements.get(name, Placement())


def plan_residency(
    components: Sequence[ComponentFacts], memory: MemoryFacts, wishes: Wishes, *, device: str
) -> ResidencyPlan:
    """The plan that moves the fewest bytes among all that fit and do as was wished.

    On the CPU nothing is offloaded but by wish: there is only one memory.

    Raises:
        OutOfMemory: none fits; the message has the numbers.
    """
    reserve = activation_reserve(memory) if device != "cpu" else 0
    budget = None if memory.device_free is None else memory.device_free - reserve
    host = memory.host_free
    if device == "cpu":
        budget = None  # the ring and the host copies come out of one memory: see _fits
    elif host is not None:
        host -= HOST_RESERVE
    options = list(_options(components, wishes, device))
    fitting = [plan for plan in options if _fits(plan, budget, host, device)]
    if not fitting:
        raise OutOfMemory(_refusal(components, options, memory, reserve, wishes, device))
    by_name = {facts.name: facts for facts in components}
    chosen = min(fitting, key=lambda plan: _cost(plan, by_name))
    placements = dict(chosen.placements)
    if budget is not None:
        placements = _fill(placements, by_name, wishes, budget)
    final = _measured(placements, by_name)
    double = _peak(placements, by_name, groups=2)
    overlap = _offloads(final) and (budget is None or double <= budget)
    return ResidencyPlan(
        placements=placements,
        overlap=overlap,
        device_bytes=double if overlap else final.device_bytes,
        host_bytes=final.host_bytes,
        note=_note(final, by_name, memory, reserve, device),
    )


def activation_reserve(memory: MemoryFacts) -> int:
    """Device bytes that weights must leave free."""
    return max(ACTIVATION_RESERVE, (memory.device_total or 0) // 10)


def _options(
    components: Sequence[ComponentFacts], wishes: Wishes, device: str
) -> Iterator[ResidencyPlan]:
    """Every assignment of modes that does as was wished. Four components: 162 at most."""
    by_name = {facts.name: facts for facts in components}
    choices = [_placements_of(facts, wishes, device) for facts in components]
    for combination in itertools.product(*choices):
        placed = dict(zip(by_name, combination, strict=True))
        yield _measured(placed, by_name)


def _placements_of(facts: ComponentFacts, wishes: Wishes, device: str) -> list[Placement]:
    wished = wishes.modes.get(facts.name)
    if wished is None and device == "cpu":
        wished = Residency.RESIDENT
    modes = [wished] if wished is not None else list(Residency)
    placements = []
    for mode in modes:
        if mode is not Residency.LAYERWISE:
            placements.append(Placement(mode))
        elif facts.streams:
            is_dit = facts.group == "dit"
            slots = facts.slots(wishes.prefetch_size if is_dit else 0.0)
            staying = [facts.layers(wishes.resident_layers) if is_dit else 0]
            if is_dit and wished is None and wishes.resident_layers == 0:
                # Some points of the trade; `_fill` goes on from the chosen one.
                staying = sorted({facts.layers(share) for share in (0, 0.25, 0.5, 0.75)})
            placements += [Placement(mode, slots, layers) for layers in staying]
    return placements


def _measured(
    placements: Mapping[str, Placement], by_name: Mapping[str, ComponentFacts]
) -> ResidencyPlan:
    return ResidencyPlan(
        placements=placements,
        device_bytes=_peak(placements, by_name, groups=1),
        host_bytes=sum(placement.in_host(by_name[n]) for n, placement in placements.items()),
    )


def _peak(
    placements: Mapping[str, Placement], by_name: Mapping[str, ComponentFacts], groups: int
) -> int:
    """Device bytes of weights when the ``groups`` largest groups in use meet."""
    always = sum(placement.always(by_name[name]) for name, placement in placements.items())
    in_use: dict[str, int] = {}
    turns: dict[str, int] = {}
    for name, placement in placements.items():
        facts, needed = by_name[name], placement.in_use(by_name[name])
        if facts.takes_turns:
            turns[facts.group] = max(turns.get(facts.group, 0), needed)
        else:
            in_use[facts.group] = in_use.get(facts.group, 0) + needed
    for group, needed in turns.items():
        in_use[group] = in_use.get(group, 0) + needed
    return always + sum(sorted(in_use.values(), reverse=True)[:groups])


def _fits(plan: ResidencyPlan, budget: int | None, host: int | None, device: str) -> bool:
    if device == "cpu":
        return host is None or plan.device_bytes + plan.host_bytes <= host
    return (budget is None or plan.device_bytes <= budget) and (
        host is None or plan.host_bytes <= host
    )


def _cost(plan: ResidencyPlan, by_name: Mapping[str, ComponentFacts]) -> tuple[int, int, int]:
    """Bytes moved for a request; then the fewer blocks in motion, then the less memory."""
    moved = sum(placement.moved(by_name[name]) for name, placement in plan.placements.items())
    modes = [placement.mode for placement in plan.placements.values()]
    return moved, modes.count(Residency.LAYERWISE), plan.device_bytes


def _fill(
    placements: Mapping[str, Placement],
    by_name: Mapping[str, ComponentFacts],
    wishes: Wishes,
    budget: int,
) -> dict[str, Placement]:
    """Keep as many leading blocks of streamed denoisers as fit, where nobody said how many."""
    filled = dict(placements)
    for name, placement in placements.items():
        facts = by_name[name]
        chosen_here = name not in wishes.modes and wishes.resident_layers == 0
        if placement.mode is not Residency.LAYERWISE or facts.group != "dit" or not chosen_here:
            continue
        for layers in range(len(facts.blocks), -1, -1):
            filled[name] = Placement(placement.mode, placement.slots, layers)
            if _peak(filled, by_name, groups=1) <= budget:
                break
    return filled


def _offloads(plan: ResidencyPlan) -> bool:
    return any(p.mode is not Residency.RESIDENT for p in plan.placements.values())


def _note(
    plan: ResidencyPlan,
    by_name: Mapping[str, ComponentFacts],
    memory: MemoryFacts,
    reserve: int,
    device: str,
) -> str | None:
    total = sum(facts.nbytes for facts in by_name.values())
    if not _offloads(plan):
        if device == "cpu" or not total:
            return None
        return (
            f"memory: all {_size(total)} of weights stay on the GPU ({_size(memory.device_free)} "
            f"are free, {_size(reserve)} of them kept for activations)"
        )
    parts = []
    for mode, verb in (
        (Residency.COMPONENT, "offloaded whole"),
        (Residency.LAYERWISE, "streamed by layers"),
    ):
        names = [
            name + _staying(placement, by_name[name])
            for name, placement in plan.placements.items()
            if placement.mode is mode
        ]
        if names:
            parts.append(f"{', '.join(names)} {verb}")
    free = "" if device == "cpu" else f" of {_size(memory.device_free)} free"
    kept = "" if device == "cpu" else f", {_size(reserve)} more kept for activations"
    return (
        f"memory: {'; '.join(parts)}: of {_size(total)} of weights {_size(plan.host_bytes)} rest "
        f"in host memory and {_size(plan.device_bytes)} at most are on the device{free}{kept}"
    )


def _staying(placement: Placement, facts: ComponentFacts) -> str:
    if not placement.resident_layers:
        return ""
    return f" (all but {placement.resident_layers} of {len(facts.blocks)} blocks)"


def _refusal(
    components: Sequence[ComponentFacts],
    options: Sequence[ResidencyPlan],
    memory: MemoryFacts,
    reserve: int,
    wishes: Wishes,
    device: str,
) -> str:
    sizes = ", ".join(f"{facts.name} {_size(facts.nbytes)}" for facts in components)
    least = min(plan.device_bytes for plan in options)
    host = min(plan.host_bytes for plan in options if plan.device_bytes == least)
    wished = ", ".join(f"{name} {mode.value}" for name, mode in wishes.modes.items())
    asked = f" With {wished}, as asked for," if wished else ""
    remedy = (
        "Offload more components, use a lower --precision, more ranks"
        if wished
        else "Use a lower --precision, more ranks"
    )
    if device == "cpu":
        need = f"{_size(least + host)} are needed; {_size(memory.host_free)} are free"
    else:
        need = (
            f"the weights need {_size(least)} of the GPU at least, beside {_size(reserve)} for "
            f"activations, and {_size(host)} of host memory beside {_size(HOST_RESERVE)}; "
            f"{_size(memory.device_free)} and {_size(memory.host_free)} are free"
        )
    return (
        f"the model does not fit ({sizes}).{asked} {need}. {remedy}, or a machine with more memory"
    )


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return "an unknown amount"
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB // 10 else f"{nbytes / 2**20:.1f} MiB"
