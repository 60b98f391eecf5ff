"""What the scheduler and the server ask of whatever runs batches.

`Worker` answers from this process; a group of processes can stand in its place. `Runner` is all
that the scheduler needs; the others are verbs that a runner may have besides.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch, Req


class Runner(Protocol):
    """Runs batches, one at a time, always called from one thread.

    It must heed ``batch.control``: report progress and previews to it while it runs, and stop
    within a step when ``control.cancelled`` is set.
    """

    def run(self, batch: Req) -> OutputBatch:
        """Run one batch.

        Raises:
            DiffusionError: the batch failed; `Cancelled` where it was stopped, `WorkerDied` where
                nothing is left to run the next one.
        """
        ...


@runtime_checkable
class Restartable(Protocol):
    """A runner that can come back after `WorkerDied`."""

    def restart(self) -> None:
        """Start over; raises a `DiffusionError` where that fails."""
        ...


@runtime_checkable
class Checkable(Protocol):
    """A runner that can say whether it still answers, also while it runs a batch.

    Called from any thread, beside `Runner.run`.
    """

    def check(self) -> None:
        """Raise a `DiffusionError` if something is gone; a hang is for the caller to notice."""
        ...


@runtime_checkable
class AdapterHost(Protocol):
    """A runner that takes LoRA adapters; called between batches, from the thread that runs them."""

    def load_lora(self, name: str, path: str) -> dict[str, Any]:
        """Load a file under a name, and say what it holds; it is not in force yet."""
        ...

    def unload_lora(self, name: str) -> None:
        """Forget an adapter."""
        ...

    def lora_status(self) -> dict[str, Any]:
        """``loaded_adapters``, and those ``active`` by component."""
        ...
