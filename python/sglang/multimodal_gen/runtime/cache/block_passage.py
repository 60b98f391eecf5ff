"""A denoiser's forward in which some of its repeated blocks may be left out.

The model's file knows nothing of it: for one call, stand-ins are put in the place of its lists of
blocks. Blocks that are left out are not called, so what waits for their calls does not happen
either: their weights are not streamed to the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from sglang.multimodal_gen.runtime.cache.graph_runner import call_plainly
from sglang.multimodal_gen.runtime.cache.step_cache_plan import (
    TABLE,
    CachedBlocks,
    StepCachePlan,
    check_split,
)
from sglang.multimodal_gen.runtime.layers.attention.usp import USPAttention
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError

Carried = tuple[Tensor, ...]
"""What one block hands to the next: [B, ...] each."""


class Turn(Protocol):
    """The decisions of one forward."""

    @property
    def by_input(self) -> bool:
        """Whether it is decided before the first block, by its input; else after it."""
        ...

    @property
    def skips(self) -> bool:
        """Whether blocks are left out; asked after `decide`."""
        ...

    def decide(self, signal: Tensor, real: Callable[[Tensor], Tensor]) -> None:
        """Take in what is compared from step to step; ``real`` takes padding off a signal."""
        ...

    @property
    def rows(self) -> Tensor | None:
        """The images that need the blocks; None if all do, or none."""
        ...

    def leave(self, index: int, entered: Carried, left: Carried) -> Carried:
        """What a list of blocks returns: it was given ``entered``, and gave ``left``, which are
        the rows that it was needed for."""
        ...


class BlockStands:
    """The stand-ins for one denoiser's blocks, made once.

    Raises:
        PipelineDefinitionError: the plan does not fit the denoiser, or its `SequencePlan` has an
            edge at a block that may be left out.
    """

    def __init__(self, denoiser: nn.Module, plan: StepCachePlan) -> None:
        self.denoiser = denoiser
        self.plan = plan
        check_split(denoiser, plan)
        lists = plan.lists(denoiser)
        self.lists = [
            nn.ModuleList(_Stand(self, block, line, index) for block in blocks)
            for index, (line, blocks) in enumerate(lists)
        ]
        self._places = [_place(denoiser, line.path) for line, _ in lists]
        attention = [m for m in lists[0][1][0].modules() if isinstance(m, USPAttention)]
        self._split = next((a for a in attention if a.is_split), None)
        self._turn: Turn | None = None
        self._entered: Carried = ()
        self._images = 0

    def call(self, turn: Turn, kwargs: Mapping[str, Any]) -> Tensor:
        """The denoiser's prediction, with the turn's decisions in force."""
        self._turn = turn
        try:
            with self._in_place():
                return call_plainly(self.denoiser, kwargs)
        finally:
            self._turn, self._entered = None, ()

    def visit(self, stand: _Stand, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A stand-in is called in its block's place."""
        turn = self._turn
        assert turn is not None
        stands = self.lists[stand.index]
        begins, ends = stand is stands[0], stand is stands[-1]
        if begins and stand.index == 0:
            output = self._open(turn, stand, args, kwargs)
        else:
            carried = stand.carried(args, kwargs)
            if begins:
                self._entered = carried
            output = _as_output(carried) if turn.skips else self._compute(turn, stand, args, kwargs)
        if not ends:
            return output
        left = _as_carried(output)
        if stand is self.lists[0][0]:  # all images' first block has computed
            left = tuple(_of_rows(x, turn.rows, self._images) for x in left)
        _check_rows(left, turn)
        return _as_output(turn.leave(stand.index, self._entered, left))

    def _open(
        self, turn: Turn, stand: _Stand, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The first block of all, in whose forward it is decided.

        Inside of it, since what is hooked before it there belongs to every pass, also to one that
        leaves it out: its weights' arrival, a split of the sequence.
        """
        block, compute = stand.block, stand.block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = stand.carried(args, kwargs)
            self._images = len(given[0])
            if turn.by_input:
                assert self.plan.signal is not None, "checked when the request came"
                turn.decide(self.plan.signal(block, *args, **kwargs), self._real)
                self._entered = given
                if turn.skips:
                    return _as_output(given)
                args, kwargs = stand.narrowed(turn.rows, args, kwargs, self._images)
                return compute(*args, **kwargs)
            output = compute(*args, **kwargs)
            self._entered = _as_carried(output)
            turn.decide(self._entered[0] - given[0], self._real)
            return output

        with _forward_of(block, forward):
            return block(*args, **kwargs)

    def _compute(
        self, turn: Turn, stand: _Stand, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        args, kwargs = stand.narrowed(turn.rows, args, kwargs, self._images)
        return stand.block(*args, **kwargs)

    def _real(self, signal: Tensor) -> Tensor:
        if self._split is None or not self.plan.streams:
            return signal
        return self._split.without_padding(signal, self.plan.streams)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        blocks = [parent._modules[name] for parent, name in self._places]
        try:
            for (parent, name), stands in zip(self._places, self.lists, strict=True):
                parent._modules[name] = stands
            yield
        finally:
            for (parent, name), own in zip(self._places, blocks, strict=True):
                parent._modules[name] = own


class _Stand(nn.Module):
    """Stands where a block is."""

    def __init__(
        self, stands: BlockStands, block: nn.Module, line: CachedBlocks, index: int
    ) -> None:
        super().__init__()
        self.block = block
        self.index = index
        arguments = list(inspect.signature(block.forward).parameters)
        self._carries = [(name, arguments.index(name)) for name in line.carries]
        self._per_image = [(name, arguments.index(name)) for name in line.per_image]
        self._stands = stands

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What its block returns, or what is told in its place."""
        return self._stands.visit(self, args, kwargs)

    def carried(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Carried:
        """The arguments that the next block gets anew."""
        return tuple(kwargs[n] if n in kwargs else args[position] for n, position in self._carries)

    def narrowed(
        self, rows: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any], images: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for some of the images; those that the block before narrowed stay."""
        if rows is None:
            return args, kwargs
        given, named = list(args), dict(kwargs)
        for name, position in (*self._carries, *self._per_image):
            if name in named:
                named[name] = _of_rows(named[name], rows, images)
            elif position < len(given):
                given[position] = _of_rows(given[position], rows, images)
        return tuple(given), named


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another forward for a while; hooks stay as they are."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _place(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, name = path.rpartition(".")
    return module.get_submodule(parent), name


def _as_carried(output: Any) -> Carried:
    return (output,) if isinstance(output, Tensor) else tuple(output)


def _as_output(carried: Carried) -> Any:
    return carried[0] if len(carried) == 1 else carried


def _check_rows(left: Carried, turn: Turn) -> None:
    """Nothing of other images came back in by broadcasting."""
    if turn.rows is not None and any(len(x) != len(turn.rows) for x in left):
        raise PipelineDefinitionError(
            f"{TABLE}: blocks were given {len(turn.rows)} images and returned {len(left[0])}: "
            "per_image does not name all of their arguments that have images first"
        )


def _of_rows(x: Any, rows: Tensor | None, images: int) -> Any:
    """The rows of some of the images, where ``x`` has those of all, once or several times."""
    if rows is None or x is None or len(x) == len(rows):
        return x
    if len(x) == images:
        return x.index_select(0, rows)
    if len(x) % images:
        raise PipelineDefinitionError(
            f"{TABLE}: {len(x)} rows for {images} images: per_image names an argument that does "
            "not have images first"
        )
    return x.unflatten(0, (-1, images)).index_select(1, rows).flatten(0, 1)
