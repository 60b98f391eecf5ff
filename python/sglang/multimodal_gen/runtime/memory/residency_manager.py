"""Brings components to the device before their stage, and sends them home after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from sglang.multimodal_gen.runtime.memory.offloaded_component import OffloadedComponent


class ResidencyManager:
    """Knows which stage uses which offloaded components.

    Args:
        components: those that are offloaded, by name; the others need no care.
        uses: stage name -> the components it uses, in running order.
        overlap: whether there is room to bring the next stage's components while a stage runs.
    """

    def __init__(
        self,
        components: Mapping[str, OffloadedComponent],
        uses: Mapping[str, Sequence[str]],
        *,
        overlap: bool = False,
    ) -> None:
        self.components = dict(components)
        self.overlap = overlap
        self._order = list(uses)
        self._uses = {
            stage: tuple(name for name in names if name in self.components)
            for stage, names in uses.items()
        }

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around one batch: however it ends, nothing of an offloaded component stays behind."""
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Around one stage, whose device work must be over when the block ends."""
        needed = self._uses.get(name, ())
        coming = self._next_needed(name)
        kept = {*needed, *coming}
        self.release(kept)
        for component in needed:
            self.components[component].begin_use()
        if self.overlap:
            for component in coming:
                self.components[component].prefetch()
        yield
        self.release(coming if self.overlap else self._uses_of_next(name))

    @contextmanager
    def use(self, *names: str) -> Iterator[None]:
        """The named components on the device, for a caller outside the stages."""
        used = [self.components[name] for name in names if name in self.components]
        try:
            for component in used:
                component.begin_use()
            yield
        finally:
            for component in used:
                component.end_use()

    def swap(self, out: str, into: str) -> None:
        """Send one component home and bring another, in the middle of a stage."""
        if out in self.components:
            self.components[out].end_use()
        if into in self.components:
            self.components[into].begin_use()

    def release(self, kept: Sequence[str] | set[str] = ()) -> None:
        """Send all components home but those to be kept."""
        with ExitStack() as each:  # one that fails keeps none of the others here
            for name, component in self.components.items():
                if name not in kept:
                    each.callback(component.end_use)

    def _next_needed(self, name: str) -> tuple[str, ...]:
        """What the next stage that uses any offloaded component uses."""
        if name not in self._uses:
            return ()
        later = self._order[self._order.index(name) + 1 :]
        return next((self._uses[stage] for stage in later if self._uses[stage]), ())

    def _uses_of_next(self, name: str) -> tuple[str, ...]:
        if name not in self._uses:
            return ()
        later = self._order[self._order.index(name) + 1 :]
        return self._uses[later[0]] if later else ()
