"""Whether two denoisers differ in their rotations alone: run both again with none.

Positions reach a denoiser as id tensors, as tables of cosines and sines, or are made inside by a
module. All of these are put to rest on both sides; what then still differs is something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang.multimodal_gen.runtime.layers.first_tensor import first_tensor
from sglang.multimodal_gen.runtime.verify.evidence import Cause, Evidence, Failure
from sglang.multimodal_gen.runtime.verify.measure import FORWARD_LIMIT, relative_l2
from sglang.multimodal_gen.runtime.verify.recorder import Attempt

_IDS = re.compile(r"(.*_)?(ids|positions)")
_TABLES = re.compile(r".*(rotary|rope|freqs|pos_embed).*")


@dataclass
class _Side:
    """One denoiser's prediction without rotations, and the tables that were taken from it."""

    prediction: Tensor | None
    tables: list[Tensor]
    ids: bool = False
    """Whether id tensors were zeroed, where no table was to be had."""

    @property
    def rested(self) -> bool:
        return bool(self.tables) or self.ids


def rotary_cause(evidence: Evidence) -> Cause | None:
    """A cause if the first prediction agrees as soon as nothing is rotated."""
    ours = _still(evidence.port.attempts, 0)
    theirs = _still(evidence.reference.attempts, evidence.reference.order[0])
    if ours is None or theirs is None or not (ours.rested and theirs.rested):
        return None
    if ours.prediction is None:
        return _of_shapes(ours, theirs)
    if theirs.prediction is None:
        return None
    error = relative_l2(ours.prediction[:1].cpu(), _row(theirs.prediction, evidence))
    if error > FORWARD_LIMIT:
        return None
    because = f"with every rotation taken out, the predictions agree ({error:.0e})"
    if ours.tables and theirs.tables:
        because += (
            ". Both sides have the same angles, so the style differs: neighbours against halves"
            if _same_angles(ours.tables[0], theirs.tables[0])
            else ". The angles differ: look at theta, the axes' widths, or the positions"
        )
    return Cause(Failure.ROTARY, because)


def _of_shapes(ours: _Side, theirs: _Side) -> Cause | None:
    if not (ours.tables and theirs.tables):
        return None
    mine, other = ours.tables[0], theirs.tables[0]
    if mine.shape[0] == other.shape[0]:
        return None
    return Cause(
        Failure.ROTARY,
        f"the port's table has {mine.shape[0]} positions, the reference's {other.shape[0]}",
    )


def _row(prediction: Tensor, evidence: Evidence) -> Tensor:
    """The positive branch's row, where one call holds several branches."""
    index = evidence.reference.order[0] if len(prediction) > 1 else 0
    return prediction[index : index + 1].cpu()


def _still(attempts: list[Attempt], index: int) -> _Side | None:
    """The forward of one recorded attempt, again, with nothing rotated."""
    if not attempts:
        return None
    attempt = attempts[min(index, len(attempts) - 1)]
    side = _run_at_rest(attempt, zero_ids=False)
    # Ids are left alone where tables are made of them: zeroed, they would hide the tables' angles.
    return side if side.tables else _run_at_rest(attempt, zero_ids=True)


def _run_at_rest(attempt: Attempt, *, zero_ids: bool) -> _Side:
    tables: list[Tensor] = []
    kwargs = dict(attempt.kwargs)
    ids = [n for n, v in kwargs.items() if isinstance(v, Tensor) and _IDS.fullmatch(n)]
    for name, value in attempt.kwargs.items():
        if zero_ids and name in ids:
            kwargs[name] = torch.zeros_like(value)
        elif _TABLES.fullmatch(name):
            kwargs[name] = _without_angle(value, tables)
    side = _Side(None, tables, zero_ids and bool(ids))
    with torch.inference_mode(), _modules_at_rest(attempt.module, tables):
        try:
            side.prediction = first_tensor(attempt.module(*attempt.args, **kwargs))
        except (RuntimeError, ValueError, TypeError, IndexError):
            return side
    return side


def _without_angle(value: Any, tables: list[Tensor]) -> Any:
    """Tables of the same form whose angles are all zero; what is no table stays as it is."""
    if isinstance(value, Tensor):
        if not value.is_complex():
            return value
        tables.append(value.real)
        return torch.ones_like(value)
    if not isinstance(value, tuple):
        return value
    parts: list[Any] = list(value)
    real = all(isinstance(part, Tensor) and part.is_floating_point() for part in parts)
    if real and len(parts) == 2 and parts[0].shape == parts[1].shape:
        tables.append(parts[0])
        rested: list[Any] = [torch.ones_like(parts[0]), torch.zeros_like(parts[1])]
    else:
        rested = [_without_angle(part, tables) for part in parts]
    return type(value)(*rested) if hasattr(value, "_fields") else tuple(rested)


@contextmanager
def _modules_at_rest(module: torch.nn.Module, tables: list[Tensor]) -> Iterator[None]:
    """Submodules that make tables return ones without angles."""

    def rest() -> Callable[..., Any]:
        return lambda _module, _args, output: _without_angle(output, tables)

    handles = [
        child.register_forward_hook(rest())
        for name, child in module.named_modules()
        if name and _TABLES.fullmatch(name.rpartition(".")[2])
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _same_angles(ours: Tensor, theirs: Tensor) -> bool:
    """Whether the last position has the same cosines, repeated and ordered in whatever way."""
    if ours.shape[0] != theirs.shape[0]:
        return False
    rows = [table.reshape(table.shape[0], -1)[-1].double().cpu() for table in (ours, theirs)]
    return all(
        torch.isclose(one[:, None], other[None], atol=1e-5, rtol=0).any(1).all().item()
        for one, other in (rows, rows[::-1])
    )
