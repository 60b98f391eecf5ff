"""What a stage is: one step of a request's journey that says what it reads and writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from sglang.multimodal_gen.runtime.pipelines_core.role import RoleType
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import REQ_FIELDS, Req
from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

if TYPE_CHECKING:
    from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
    from sglang.multimodal_gen.runtime.server_args import ServerArgs


class PipelineStage(ABC):
    """One step of a pipeline.

    ``reads`` and ``writes`` name fields of `Req`; from them the pipeline checks its chain when it
    is built, frees tensors after their last reader, and prints its own documentation. A subclass
    may read more than its base and must not write less. A stage that declares neither (None) is
    taken to read and write anything: it works, but the chain around it cannot be checked.

    Raises:
        PipelineDefinitionError: at class creation, for a field that `Req` does not have.
    """

    reads: ClassVar[frozenset[str] | None] = None
    writes: ClassVar[frozenset[str] | None] = None
    role_affinity: ClassVar[RoleType] = RoleType.ENCODER
    uses: ClassVar[tuple[str, ...] | None] = None
    """Attributes that hold the components (or lists of them) whose weights this stage needs, for
    any task it serves: they are on the device while it runs, and may be in host memory before and
    after. None: every component that the stage holds."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for kind, names in (("reads", cls.reads), ("writes", cls.writes)):
            for name in sorted((names or frozenset()) - REQ_FIELDS):
                raise PipelineDefinitionError(
                    f"{cls.__name__}.{kind} names {name!r}, which Req does not have."
                    f"{did_you_mean(name, REQ_FIELDS)}"
                )
        if (cls.reads is None) != (cls.writes is None):
            raise PipelineDefinitionError(
                f"{cls.__name__} must declare both `reads` and `writes`, or neither"
            )
        for base in cls.__mro__[1:]:
            dropped = (base.__dict__.get("writes") or frozenset()) - (cls.writes or frozenset())
            if dropped:
                raise PipelineDefinitionError(
                    f"{cls.__name__}.writes drops {sorted(dropped)} of {base.__name__}: later "
                    "stages rely on them"
                )

    @abstractmethod
    def forward(self, batch: Req, server_args: ServerArgs) -> Req:
        """Do the step on ``batch`` and return it."""

    @staticmethod
    def pipeline_config(server_args: ServerArgs) -> PipelineConfig:
        """The family's data and hooks, which the pipeline put into the arguments at build."""
        assert server_args.pipeline_config is not None, "run a stage through its pipeline"
        return server_args.pipeline_config

    def __call__(self, batch: Req, server_args: ServerArgs) -> Req:
        """The same as `forward`."""
        return self.forward(batch, server_args)
