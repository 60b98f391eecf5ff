"""Records that are open while they are put together and read-only from then on.

Porters write plain ``@dataclass`` subclasses of `SamplingParams` and `PipelineConfig`, and a plain
dataclass cannot inherit from a frozen one. So these records are frozen by an act: `seal`, which
admission and the pipeline call once.
"""

from __future__ import annotations

from typing import Any, Self

from sglang.multimodal_gen.runtime.utils.errors import InternalError


class Sealable:
    """Adds `seal`, after which assignments are refused."""

    _sealed = False

    def seal(self) -> Self:
        """Make this record read-only, for good; change a copy (``dataclasses.replace``) instead."""
        object.__setattr__(self, "_sealed", True)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if self._sealed:
            raise InternalError(
                f"{type(self).__name__}.{name} is read-only once a pipeline or a request is built: "
                "nothing about one request may change what the next one sees; use "
                "dataclasses.replace"
            )
        object.__setattr__(self, name, value)
