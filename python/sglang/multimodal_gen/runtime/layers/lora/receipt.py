"""What loading an adapter did, for people."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

SHOWN = 6


@dataclass(frozen=True, slots=True)
class LoRAReceipt:
    """What one adapter file holds and where it went.

    ``scaling`` lists each factor of ``B A`` at weight 1, with how many linears have it;
    ``modules`` are the linears changed, by component; ``relative_change`` is
    ``|scaling * B A| / |W|`` (Frobenius, over the linears changed), by component.
    """

    nickname: str
    path: str
    format: str
    ranks: tuple[int, ...]
    alpha_source: str
    scaling: Mapping[float, int]
    modules: Mapping[str, tuple[str, ...]]
    relative_change: Mapping[str, float]
    matched: tuple[str, ...]
    unmatched: tuple[str, ...]
    unsupported: tuple[str, ...]

    def summary(self) -> str:
        """The receipt in one line."""
        ranks = "/".join(map(str, self.ranks))
        factors = ", ".join(
            f"x{factor:.4g}" + (f" on {count} linears" if len(self.scaling) > 1 else "")
            for factor, count in sorted(self.scaling.items())
        )
        changed = "; ".join(
            f"{len(paths)} linears of {name} change by {self.relative_change[name]:.2%}"
            for name, paths in self.modules.items()
        )
        source = "no alpha" if self.alpha_source == "none" else f"alpha from {self.alpha_source}"
        text = (
            f"lora {self.nickname!r} ({self.path}): {self.format}, rank {ranks}, scaled {factors} "
            f"({source}); {changed}; {len(self.matched)} tensors used"
        )
        return "; ".join([text, *self.leftovers()])

    def leftovers(self) -> list[str]:
        """What of the file is not applied, one phrase for each reason."""
        phrases = []
        if self.unmatched:
            phrases.append(
                f"{len(self.unmatched)} tensors name no module of this pipeline: "
                f"{listed(self.unmatched)}"
            )
        if self.unsupported:
            phrases.append(
                f"{len(self.unsupported)} tensors of a kind that is not applied: "
                f"{listed(self.unsupported)}"
            )
        return phrases


def refuse_no_change(receipt: LoRAReceipt) -> None:
    """Refuse an adapter that leaves every weight as it is.

    Raises:
        CheckpointError: says what makes it nothing.
    """
    if any(change != 0 for change in receipt.relative_change.values()):
        return
    if set(receipt.scaling) == {0.0}:
        why = f"its alpha is 0 (from {receipt.alpha_source})"
    else:
        why = "its factors multiply to 0, as those of an adapter that was never trained do"
    raise CheckpointError(f"{receipt.path} changes nothing of this pipeline: {why}.")


def why_nothing(path: str, names: Collection[str], reasons: Mapping[str, str]) -> str:
    """Why a file changes nothing whose names are not another model's.

    ``reasons`` are of tensors whose names lead to modules, and that cannot be applied.
    """
    if not names:
        return f"{path} changes nothing of this pipeline: it holds no tensors."
    if not reasons:
        return (
            f"{path} changes nothing of this pipeline: none of its {len(names)} tensors is a LoRA "
            f"factor (lora_A and lora_B, or lora_down and lora_up). It has: {listed(list(names))}."
        )
    told = [f"{name!r} {reason}" for name, reason in reasons.items()]
    more = f"; and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
    return (
        f"{path} changes nothing of this pipeline. Its names lead to modules, but "
        f"{'; '.join(told[:SHOWN])}{more}."
    )


def listed(names: tuple[str, ...] | list[str]) -> str:
    """Some names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
