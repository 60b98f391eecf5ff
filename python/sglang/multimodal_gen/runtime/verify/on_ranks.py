"""A mechanism's run on several ranks: which are started, what each does, and what it reports."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.loader.components import read_component_configs
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.managers.open_worker import open_worker
from sglang.multimodal_gen.runtime.managers.worker import Worker
from sglang.multimodal_gen.runtime.managers.worker_group import WorkerGroup
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.pipelines_core.stages.vae_work import VAEWork
from sglang.multimodal_gen.runtime.platforms.device import device_facts
from sglang.multimodal_gen.runtime.server_args.parallel_args import ParallelArgs
from sglang.multimodal_gen.runtime.server_args.resolve_parallel import resolve_parallel
from sglang.multimodal_gen.runtime.server_args.vae_section import VAEArgs
from sglang.multimodal_gen.runtime.utils.errors import OutOfMemory, UserError
from sglang.multimodal_gen.runtime.verify.port import Port, kind_of
from sglang.multimodal_gen.runtime.verify.request import Request
from sglang.multimodal_gen.runtime.verify.shrunk_config import head_counts

Say = Callable[[str], None]

LAYOUTS: Mapping[str, ParallelArgs] = {
    "cfg": ParallelArgs(enable_cfg_parallel=True),
    "tp": ParallelArgs(tp_size=2),
    "sp": ParallelArgs(sp_degree=2),
    "tp-sp": ParallelArgs(tp_size=2, sp_degree=2),
}
"""The layouts that are tried. How an SP degree is made of Ulysses and ring follows from the heads;
with two branches of guidance on two ranks, each rank has the whole model."""


class CannotRun(Exception):
    """Ranks of this layout cannot be had on this machine; why."""


class Refused(Exception):
    """The model says itself that it has no such layout; why."""


@dataclass(frozen=True)
class RankRun:
    """What one rank saw of a request.

    ``traffic`` is counted by the roles of the components that a stage uses, the group's name and
    the verb. ``picture`` is None on ranks that decode nothing.
    """

    first_prediction: Tensor | None
    latents: Tensor | None
    embeddings: Mapping[str, Tensor]
    picture: Tensor | None
    traffic: Counter[tuple[str, str, str]]

    def calls(self, role: str, *groups: str) -> int:
        """Calls that stages with a component of this role made in these groups; in all, if none."""
        return sum(
            count
            for (of, group, _), count in self.traffic.items()
            if of == role and (not groups or group in groups)
        )


@dataclass(frozen=True)
class RankDecode:
    """What one rank did of a decode; the picture is empty where it only helped."""

    mode: str
    picture: Tensor
    tiles: int
    exchanges: int


@dataclass
class Ranks:
    """Starts ranks when a layout is asked for; those of one layout at a time are there.

    A layout's run of the request is made once, for all rows that look at it. ``classes`` are those
    of the pipeline's components: ranks must be able to import them. ``planless``: one of those has
    no ``TP_PLAN``, so that layouts are refused rightly.
    """

    model: ModelDescription
    say: Say
    classes: tuple[type, ...] = ()
    planless: bool = False
    _name: str | None = None
    _group: WorkerGroup | None = None
    _runs: dict[str, list[RankRun]] = field(default_factory=dict)

    def run(self, layout: str, request: Request) -> list[RankRun]:
        """The request on all ranks of a layout, by rank.

        Raises:
            CannotRun: the machine has no such layout.
            Refused: the model has none.
            DiffusionError: the run failed, or the model refuses a layout that its heads divide by.
        """
        if layout not in self._runs:
            pixels = None if request.image is None else np.asarray(request.image)
            self._runs[layout] = self._on_all(layout, run_here, request.values, pixels)
        return self._runs[layout]

    def decode(
        self, mode: str, tile: int | None, latents: Tensor, layout: str = "cfg"
    ) -> list[RankDecode]:
        """The latents decoded by all ranks of a layout together, by rank; raises as `run`."""
        try:
            return self._on_all(layout, decode_here, mode, tile, latents)
        except UserError as error:
            raise Refused(" ".join(str(error).split())) from error

    def close(self) -> None:
        """End the ranks; nothing of them stays."""
        if self._group is not None:
            self._group.close()
        self._name = self._group = None

    def _on_all(self, layout: str, function: Callable[..., Any], *args: Any) -> list[Any]:
        group = self._opened(layout)
        found = group.call(function, *args)
        return [found[rank] for rank in sorted(found)]

    def _opened(self, layout: str) -> WorkerGroup:
        if self._group is not None and self._name == layout:
            return self._group
        self.close()
        info = self.model.info
        own = (info.pipeline_cls, info.sampling_param_cls, type(self.model.config))
        for cls in (*self.classes, *own):
            if cls.__module__ == "__main__":
                raise CannotRun(
                    f"{cls.__qualname__} is defined in the script that runs, which ranks do not "
                    "run again; put it in a module of its own, which each of them can import"
                )
        try:
            model, words = _with_layout(self.model, LAYOUTS[layout])
        except UserError as error:
            raise CannotRun(" ".join(str(error).split())) from error
        self.say(f"starting {words}")
        try:
            group = open_worker(model)
        except OutOfMemory as error:
            raise CannotRun(" ".join(str(error).split())) from error
        except UserError as error:
            # Its own numbers and classes say so, or its plan is wrong: then the row fails.
            words = " ".join(str(error).split())
            ranks = model.server_args.parallel.layout
            if self.planless or not _heads_divide(self.model, (ranks.tp, ranks.sp)):
                raise Refused(words) from error
            raise UserError(words) from None  # of the rank's traceback nothing is needed
        assert isinstance(group, WorkerGroup), "each layout has several ranks"
        self._name, self._group = layout, group
        return group


def _heads_divide(model: ModelDescription, sizes: Sequence[int]) -> bool:
    """Whether all counts of heads in the checkpoint's configs divide: a right plan's do then too.

    Encoders are spread over the ranks of the sequence too, over some of them where all are too
    many.
    """
    ways = min((size for size in sizes if size > 1), default=1)
    cls = model.info.pipeline_cls
    configs = {
        **cls.default_component_configs,
        **read_component_configs(model.source, cls._index_names(), model.server_args),
    }
    return all(count % ways == 0 for config in configs.values() for count in head_counts(config))


def _with_layout(model: ModelDescription, asked: ParallelArgs) -> tuple[ModelDescription, str]:
    """The model on the ranks of a layout, its VAE on one of them, and that layout in words."""
    args = model.server_args
    parallel = resolve_parallel(asked, args.platform.device, device_facts(), None, [])
    args = dataclasses.replace(args, parallel=parallel, vae=VAEArgs(vae_mode="plain"))
    model, _ = dataclasses.replace(model, server_args=args).fitted(asked)
    layout = model.server_args.parallel.layout
    sizes = {"cfg": layout.cfg, "ring": layout.ring, "Ulysses": layout.ulysses, "TP": layout.tp}
    words = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return model, f"{layout.world_size} ranks: {words}"


# What a rank does: called there, with its worker.


def run_here(
    worker: Worker, values: Mapping[str, Any], pixels: np.ndarray | None = None
) -> RankRun:
    """One request, as every rank of the replica runs it; ``pixels`` are its input image."""
    request = Request(values, None if pixels is None else Image.fromarray(pixels))
    port = Port(worker.model, worker)
    traffic: Counter[tuple[str, str, str]] = Counter()
    with ExitStack() as stack:
        for name, stage in worker.pipeline.stages.items():
            uses = worker.pipeline.stage_uses[name]
            roles = {kind_of(component, type(worker.pipeline)) for component in uses}
            counting = _counting(stage.forward, roles, worker.pipeline.parallel, traffic)
            stack.enter_context(patch.object(stage, "forward", counting))
        record = port.run(request)
    if record.error is not None:
        raise record.error
    return RankRun(
        first_prediction=record.steps[0].prediction if record.steps else None,
        latents=record.steps[-1].latents if record.steps else None,
        embeddings=record.embeddings,
        picture=record.picture,
        traffic=traffic,
    )


@torch.inference_mode()
def decode_here(worker: Worker, mode: Any, tile: int | None, latents: Tensor) -> RankDecode:
    """One decode, in the way that the decoding stage would choose for ``mode``."""
    parallel, vae = worker.pipeline.parallel, Port(worker.model, worker).decoder
    work = VAEWork(vae, parallel.replica, VAEArgs(vae_mode=mode, vae_tile_size=tile))
    before = _traffic(parallel)
    with counted_tiles(vae) as tiles:
        picture = work.decode(latents.to(parallel.device))
    exchanges = sum((_traffic(parallel) - before).values())
    if mode == "tiled":
        vae.disable_tiling()
    return RankDecode(work.mode_for(latents), picture.detach().cpu(), tiles["tiles"], exchanges)


@contextmanager
def counted_tiles(vae: Any) -> Iterator[Counter[str]]:
    """Counts, as ``tiles``, the latents that a VAE decodes at once while the context is open."""
    counts: Counter[str] = Counter()
    decode = vae._decode

    def counted(z: Tensor) -> Tensor:
        counts["tiles"] += 1
        return decode(z)

    with patch.object(vae, "_decode", counted):
        yield counts


def _counting(
    forward: Callable[..., Req],
    roles: set[str],
    parallel: ParallelState,
    traffic: Counter[tuple[str, str, str]],
) -> Callable[..., Req]:
    """A stage's forward that notes, by role, what was sent meanwhile."""

    def counting(batch: Req, *args: Any, **kwargs: Any) -> Req:
        before = _traffic(parallel)
        batch = forward(batch, *args, **kwargs)
        for (group, verb), count in (_traffic(parallel) - before).items():
            for role in roles:
                traffic[role, group, verb] += count
        return batch

    return counting


def _traffic(parallel: ParallelState) -> Counter[tuple[str, str]]:
    """Calls so far, by group and verb; without ``control``, which carries decisions."""
    values = [getattr(parallel, f.name) for f in dataclasses.fields(parallel)]
    groups = {id(g): g for g in (*values, *parallel.spreads) if isinstance(g, Group)}
    counts: Counter[tuple[str, str]] = Counter()
    for group in groups.values():
        if group is not parallel.control:
            for verb, count in group.traffic.items():
                counts[group.name, verb] += count
    return counts
