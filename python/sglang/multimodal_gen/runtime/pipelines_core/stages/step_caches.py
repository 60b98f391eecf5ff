"""Steps that are skipped where little changes: a collaborator of the denoising loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from sglang.multimodal_gen.configs.step_cache_choice import chosen
from sglang.multimodal_gen.runtime.cache.block_passage import BlockStands
from sglang.multimodal_gen.runtime.cache.step_cache import StepCacheRun
from sglang.multimodal_gen.runtime.cache.step_cache_plan import method_problem, step_cache_plan
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest

_FEWEST_BLOCKS = 2


class StepCacheCalls:
    """Calls the denoisers of one batch: what is kept between its steps lives in here, and ends with
    it. Branches of guidance and experts are kept apart.

    Args:
        run: the decisions, and what they are made by.
        stands: of each denoiser, made once for all batches.
        names: each denoiser's component.
        dealt_out: whether no one rank has all that is kept.
    """

    def __init__(
        self,
        run: StepCacheRun,
        stands: Mapping[nn.Module, BlockStands],
        names: Mapping[nn.Module, str],
        *,
        dealt_out: bool = False,
    ) -> None:
        self.run = run
        self.stands = stands
        self.names = names
        self.dealt_out = dealt_out

    def __call__(self, denoiser: nn.Module, branch: int, kwargs: Mapping[str, Any]) -> Tensor:
        """The prediction of a branch of guidance."""
        return self.run.call(self.stands[denoiser], f"{self.names[denoiser]}.{branch}", kwargs)

    def kept(self) -> dict[str, Any]:
        """What the state of a loop holds of it."""
        return self.run.kept()

    def take_up(self, kept: Mapping[str, Any]) -> None:
        """Go on from what `kept` gave."""
        self.run.take_up(kept)


class StepCaches:
    """Begins a step cache for each batch that wants one, and says what it saved.

    Args:
        denoisers: the components that make steps, by name.
        parallel: this rank's place. Ranks that deal a sequence or weights out decide together;
            those that deal branches out each have their own.
    """

    def __init__(self, denoisers: Mapping[str, nn.Module], parallel: ParallelState) -> None:
        self.denoisers = denoisers
        self.parallel = parallel
        self._stands: dict[nn.Module, BlockStands] = {}

    def begin(self, batch: Req) -> StepCacheCalls | None:
        """For a batch whose loop begins; None where it wants none.

        Raises:
            InvalidRequest: a denoiser does not say what is needed.
        """
        request = batch.request
        choice = chosen(request.step_cache, request.step_cache_threshold, None)
        if choice is None:
            return None
        for denoiser in self.denoisers.values():
            problem = method_problem(type(denoiser), choice.method)
            if problem is not None:
                raise InvalidRequest("step_cache", choice.method, problem)
            if denoiser not in self._stands:
                self._stands[denoiser] = _stands_of(denoiser, choice.method)
        names = {denoiser: name for name, denoiser in self.denoisers.items()}
        run = StepCacheRun(choice, batch.batch_size, self.parallel.weights)
        dealt_out = self.parallel.sp.size > 1 or self.parallel.cfg.size > 1
        return StepCacheCalls(run, self._stands, names, dealt_out=dealt_out)

    def end(self, batch: Req, calls: StepCacheCalls | None) -> None:
        """The loop is over: tell what was saved."""
        if calls is not None:
            batch.step_cache = calls.run.use(self.parallel.cfg, self.parallel.device)


def _stands_of(denoiser: nn.Module, method: str) -> BlockStands:
    plan = step_cache_plan(type(denoiser))
    assert plan is not None, "method_problem said so"
    if sum(len(blocks) for _, blocks in plan.lists(denoiser)) < _FEWEST_BLOCKS:
        problem = (
            f"this checkpoint's {type(denoiser).__name__} has fewer than {_FEWEST_BLOCKS} blocks, "
            "so there is none to leave out. Leave it out"
        )
        raise InvalidRequest("step_cache", method, problem)
    return BlockStands(denoiser, plan)
