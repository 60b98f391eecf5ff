"""Blocks left out of a step because they would change little: what one batch keeps, and decides.

First-block cache: the first block is always computed, and what it adds to its input is compared
with what it added when the others were last computed. TeaCache (Liu et al. 2024): nothing is
computed but the first block's modulated input; its changes, rescaled by a polynomial fitted to the
architecture, add up until the threshold. Where the change is small, what all other blocks added to
their input the last time is added again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sglang.multimodal_gen.configs.step_cache_choice import StepCacheChoice
from sglang.multimodal_gen.runtime.cache.block_passage import BlockStands, Carried
from sglang.multimodal_gen.runtime.distributed.group import Group

ALONE = Group("alone")
_TINY = 1e-12


@dataclass(frozen=True, slots=True)
class StepCacheUse:
    """What a step cache saved a batch.

    Attributes:
        forwards: calls of the denoiser for each image: steps, or twice as many with guidance.
        reused: for each image, those of them that left its blocks out.
    """

    forwards: int
    reused: tuple[int, ...]

    def rows(self, start: int, stop: int) -> StepCacheUse:
        """The same for some of the images."""
        return StepCacheUse(self.forwards, self.reused[start:stop])

    def and_then(self, other: StepCacheUse) -> StepCacheUse:
        """Of two batches of one request."""
        return StepCacheUse(self.forwards, self.reused + other.reused)

    @property
    def left_out(self) -> int:
        """Of all images together."""
        return sum(self.reused)

    @property
    def computed(self) -> int:
        """Of all images together."""
        return self.forwards * len(self.reused) - self.left_out


@dataclass(slots=True, eq=False)
class BranchState:
    """What one branch of guidance keeps of one expert, from call to call; images come first.

    Attributes:
        signal: what the next one is compared with, [B, ...].
        added: for each list of blocks, what they added to what they were given.
        change: for TeaCache, each image's changes since its blocks were last computed.
    """

    signal: Tensor | None = None
    added: list[tuple[Tensor, ...]] = field(default_factory=list)
    change: list[float] = field(default_factory=list)

    def kept(self) -> dict[str, Any]:
        """As a loop's state holds it: tensors, all with images first, by name."""
        if self.signal is None:
            return {}
        added = {f"{i}.{j}": x for i, part in enumerate(self.added) for j, x in enumerate(part)}
        change = torch.tensor(self.change, dtype=torch.float64)
        return {"signal": self.signal, "change": change, "added": added}

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> BranchState:
        """What `kept` gave."""
        if not kept:
            return cls()
        lists: dict[int, list[Tensor]] = {}
        for name, x in kept["added"].items():
            lists.setdefault(int(name.partition(".")[0]), []).append(x)
        added = [tuple(lists[index]) for index in sorted(lists)]
        return cls(kept["signal"], added, kept["change"].tolist())


class StepCacheRun:
    """The step cache of one batch: made when its loop begins, gone when it ends.

    It is decided for each image by itself, so that what becomes of it does not depend on its
    company: where some images of a batch need their blocks, these are computed for them alone.

    Each decision waits for the device once, for one number an image.

    Args:
        choice: the method and its threshold.
        images: of the batch.
        group: the ranks that must decide alike: those among which a sequence or weights are dealt.
    """

    def __init__(self, choice: StepCacheChoice, images: int, group: Group = ALONE) -> None:
        self.choice = choice
        self.group = group
        self.states: dict[str, BranchState] = {}
        self.forwards = 0
        self.reused = [0] * images

    def call(self, stands: BlockStands, branch: str, kwargs: Mapping[str, Any]) -> Tensor:
        """The denoiser's prediction; ``branch`` names the branch of guidance and the expert."""
        turn = _Turn(self, self.states.setdefault(branch, BranchState()), stands.plan.polynomial)
        prediction = stands.call(turn, kwargs)
        self.forwards += 1
        self.reused = [n + reuse for n, reuse in zip(self.reused, turn.reuse, strict=True)]
        return prediction

    def use(self, cfg: Group, device: torch.device) -> StepCacheUse:
        """What it saved, of both branches where ``cfg`` deals them out; all its ranks call this."""
        counts = torch.tensor([self.forwards, *self.reused], device=device)
        forwards, *reused = cfg.all_gather(counts[None]).sum(0).tolist()
        return StepCacheUse(forwards, tuple(reused))

    def kept(self) -> dict[str, Any]:
        """All of it, as a loop's state holds it: every tensor has images first."""
        return {
            "method": self.choice.method,
            "threshold": self.choice.threshold,
            "forwards": self.forwards,
            "reused": torch.tensor(self.reused),
            "branches": {name: state.kept() for name, state in self.states.items()},
        }

    def take_up(self, kept: Mapping[str, Any]) -> None:
        """Go on from what `kept` gave."""
        self.forwards = kept["forwards"]
        self.reused = kept["reused"].tolist()
        self.states = {name: BranchState.of(state) for name, state in kept["branches"].items()}

    def changes(self, new: Tensor, old: Tensor) -> list[float]:
        """How far each image's signal is from another, relative to it, by the mean distance."""
        new, old = new.float().flatten(1), old.float().flatten(1)
        sums = torch.stack(((new - old).abs().sum(1), old.abs().sum(1)))
        if self.group.size > 1:
            # Gathered and then added, in one order everywhere: all ranks see the same bits.
            sums = self.group.all_gather(sums[None]).sum(0)
        return (sums[0] / sums[1].clamp_min(_TINY)).tolist()


class _Turn:
    """The decisions of one forward of one branch."""

    def __init__(self, run: StepCacheRun, state: BranchState, polynomial: Sequence[float]) -> None:
        self.run = run
        self.state = state
        self.polynomial = polynomial
        self.reuse = [False] * len(run.reused)
        self.rows: Tensor | None = None

    @property
    def by_input(self) -> bool:
        """TeaCache looks at the first block's input."""
        return self.run.choice.method == "teacache"

    @property
    def skips(self) -> bool:
        """Whether no image needs the blocks."""
        return all(self.reuse)

    def decide(self, signal: Tensor, real: Callable[[Tensor], Tensor]) -> None:
        """Each image by itself; the first time, and where shapes differ, all need their blocks."""
        state, old = self.state, self.state.signal
        if old is None or old.shape != signal.shape or old.dtype != signal.dtype:
            state.signal, state.change = signal, [0.0] * len(signal)
            return
        changes = self.run.changes(real(signal), real(old))
        if self.by_input:
            total = [have + _value(self.polynomial, new) for have, new in
                     zip(state.change, changes, strict=True)]  # fmt: skip
        else:
            total = changes
        limit = self.run.choice.threshold
        self.reuse = [limit > 0 and change < limit for change in total]
        needed = [index for index, reuse in enumerate(self.reuse) if not reuse]
        if 0 < len(needed) < len(self.reuse):
            self.rows = torch.tensor(needed, device=signal.device)
        if self.by_input:
            state.change = [c if reuse else 0.0 for c, reuse in zip(total, self.reuse, strict=True)]
        if self.by_input or not any(self.reuse):
            state.signal = signal
        elif self.rows is not None:
            state.signal = old.index_copy(0, self.rows, signal.index_select(0, self.rows))

    def leave(self, index: int, entered: Carried, left: Carried) -> Carried:
        """For each image what the blocks of a list made of it, or what they added the last time."""
        added, rows = self.state.added, self.rows
        if self.skips:
            return tuple(x + more for x, more in zip(entered, added[index], strict=True))
        if rows is None:
            added[index : index + 1] = [tuple(map(torch.sub, left, entered))]
            return left
        made, kept = [], []
        for before, more, after in zip(entered, added[index], left, strict=True):
            made.append((before + more).index_copy(0, rows, after))
            kept.append(more.index_copy(0, rows, after - before.index_select(0, rows)))
        added[index] = tuple(kept)
        return tuple(made)


def _value(polynomial: Sequence[float], x: float) -> float:
    """Coefficients from the highest power on."""
    result = 0.0
    for coefficient in polynomial:
        result = result * x + coefficient
    return result
