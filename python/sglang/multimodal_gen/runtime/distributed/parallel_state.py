"""Who works on what: the groups that follow from the layout of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import prod

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sglang.multimodal_gen.runtime.distributed.group import Group
from sglang.multimodal_gen.runtime.distributed.layout import MESH_DIMS, ParallelLayout


@dataclass(frozen=True, eq=False, kw_only=True)
class ParallelState:
    """This process's place in the layout, and the groups it belongs to.

    Made once in each process and handed down when things are built. ``device`` is where this rank
    computes. Groups of one rank cost nothing, so code for one rank and for many is the same.

    Attributes:
        mesh: torch's mesh with dimensions `MESH_DIMS`; None in a run of one rank.
        tp, ulysses, ring, cfg: along one dimension of the mesh.
        sp: ring x ulysses. Rank r of it holds the r-th piece of the sequence.
        weights: ring x ulysses x tp, what text encoders are spread over. Weights of the denoiser
            are equal on the ranks of ``sp``, of an encoder's on none.
        spreads: the groups of more than one rank that vary along some of ring, ulysses and tp, and
            no other dimension; the largest, ``weights``, first. What does not divide over all of
            them may over fewer.
        replica: all ranks that work on one request.
        control: the same ranks, on the CPU (gloo): decisions, not tensors of the model.
    """

    layout: ParallelLayout
    rank: int
    device: torch.device
    mesh: DeviceMesh | None
    tp: Group
    ulysses: Group
    ring: Group
    sp: Group
    cfg: Group
    weights: Group
    replica: Group
    control: Group
    spreads: tuple[Group, ...] = ()

    @classmethod
    def single(cls, device: str | torch.device = "cpu") -> ParallelState:
        """One rank, all alone; needs no process group."""
        alone = {
            name: Group(name)
            for name in ("tp", "ulysses", "ring", "sp", "cfg", "weights", "replica", "control")
        }
        return cls(
            layout=ParallelLayout(),
            rank=0,
            device=torch.device(device),
            mesh=None,
            spreads=(),
            **alone,
        )

    @classmethod
    def create(cls, layout: ParallelLayout, device: str | torch.device) -> ParallelState:
        """Make the groups; every rank of the run calls this after ``init_process_group``.

        Raises:
            ValueError: the layout does not have as many ranks as the run.
        """
        world = dist.get_world_size()
        if layout.world_size != world:
            raise ValueError(f"{layout} has {layout.world_size} ranks, but {world} were started")
        device = torch.device(device)
        mesh = init_device_mesh(device.type, layout.shape, mesh_dim_names=MESH_DIMS)
        ranks = torch.arange(world).view(layout.shape)
        inner = {
            ("tp",): _along(ranks, "tp", ("tp",)),
            ("ulysses",): _along(ranks, "ulysses", ("ulysses",)),
            ("ring",): _along(ranks, "ring", ("ring",)),
            ("ring", "ulysses"): _along(ranks, "sp", ("ring", "ulysses")),
            ("ring", "ulysses", "tp"): _along(ranks, "weights", ("ring", "ulysses", "tp")),
        }
        return cls(
            layout=layout,
            rank=dist.get_rank(),
            device=device,
            mesh=mesh,
            tp=inner["tp",],
            ulysses=inner["ulysses",],
            ring=inner["ring",],
            sp=inner["ring", "ulysses"],
            cfg=_along(ranks, "cfg", ("cfg",)),
            weights=inner["ring", "ulysses", "tp"],
            spreads=_spreads(ranks, inner),
            replica=_along(ranks, "replica", MESH_DIMS[1:]),
            control=_along(ranks, "control", MESH_DIMS[1:], backend="gloo"),
        )


def _spreads(ranks: torch.Tensor, made: dict[tuple[str, ...], Group]) -> tuple[Group, ...]:
    """Groups along every choice of the dimensions of ``weights``, made where they are not yet."""
    *_, widest = made
    dims = [dim for dim in widest if made[dim,].size > 1]
    spreads: dict[tuple[str, ...], Group] = {tuple(dims): made[widest]} if dims else {}
    for count in range(1, len(dims)):
        for choice in combinations(dims, count):
            found = made.get(choice)
            spreads[choice] = found or _along(ranks, " x ".join(choice), choice)
    # Among equals, one with tp in it first: its ranks share the fastest link.
    order = sorted(spreads, key=lambda choice: (-spreads[choice].size, "tp" not in choice))
    return tuple(spreads[choice] for choice in order)


def _along(
    ranks: torch.Tensor, name: str, dims: tuple[str, ...], backend: str | None = None
) -> Group:
    """The group of this process that varies along ``dims`` while the rest stays fixed."""
    inner = [MESH_DIMS.index(dim) for dim in dims]
    outer = [i for i in range(ranks.ndim) if i not in inner]
    rows = ranks.permute(*outer, *inner).reshape(-1, prod(ranks.shape[i] for i in inner)).tolist()
    mine = dist.get_rank()
    found = Group(name)
    for row in rows:
        if len(row) == 1:
            continue
        # torch wants every process to make every group, in the same order.
        handle = dist.new_group(row, backend=backend)
        if isinstance(handle, ProcessGroup):
            found = Group(name, row.index(mine), tuple(row), handle)
    return found if found.size > 1 else Group(name, 0, (mine,))
