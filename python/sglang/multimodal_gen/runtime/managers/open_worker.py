"""Which worker carries a model: one of this process, or a group of ranks."""

from __future__ import annotations

from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.managers.ranks.follower import follow, is_front
from sglang.multimodal_gen.runtime.managers.worker import Worker
from sglang.multimodal_gen.runtime.managers.worker_group import WorkerGroup
from sglang.multimodal_gen.runtime.utils.environ import LaunchedRank
from sglang.multimodal_gen.runtime.utils.progress import ProgressListener


def open_worker(
    model: ModelDescription,
    *,
    progress: ProgressListener | None = None,
    launched: LaunchedRank | None = None,
) -> Worker | WorkerGroup:
    """Load the model where its arguments say.

    Where this process only follows another (torchrun's ranks but the first, nodes but number 0), it
    works for it here until that one is done, and then ends.

    Raises:
        SystemExit: this process followed another, and all is well.
        WorkerDied: a rank failed alone, or is gone.
    """
    parallel = model.server_args.parallel
    if not is_front(parallel, launched):
        follow(model, launched)
        raise SystemExit(0)
    if parallel.layout.world_size > 1:
        return WorkerGroup(model, progress=progress, launched=launched)
    return Worker(model, progress=progress)
