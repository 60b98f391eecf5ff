"""The section on many ranks: how many, on which machines, and what is split over them."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.multimodal_gen.runtime.distributed.layout import ParallelLayout
from sglang.multimodal_gen.runtime.server_args.flags import check_fields, flag
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

_COUNTS = (
    "num_gpus", "tp_size", "sp_degree", "ulysses_degree", "ring_degree", "dp_size", "nnodes"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelArgs:
    """How many ranks work, where they run, and what each of them does.

    What is left out (None) is chosen in `resolve_parallel`.
    """

    num_gpus: int | None = flag(
        None,
        help="Ranks over all nodes, one GPU each; on a CPU they are processes. Left out, it is "
        "what the sizes below multiply to, or what torchrun started.",
    )
    tp_size: int | None = flag(None, help="Pieces of each weight (tensor parallelism); 1.")
    sp_degree: int | None = flag(
        None, help="Pieces of the sequence; what the other sizes leave of --num-gpus."
    )
    ulysses_degree: int | None = flag(
        None, help="Pieces of the sequence that attention exchanges by heads; all of --sp-degree."
    )
    ring_degree: int | None = flag(
        None, help="Pieces of the sequence that attention passes round in a ring; 1."
    )
    enable_cfg_parallel: bool = flag(
        False, help="Run the two branches of classifier-free guidance on two halves of the ranks."
    )
    dp_size: int = flag(
        1,
        aliases=("--dp", "--data-parallel-size"),
        help="Copies of the model, which work on different batches at the same time.",
    )
    nnodes: int = flag(1, help="Machines that work together, each with the same command.")
    node_rank: int = flag(0, help="Which of them this is, from 0. Number 0 gives the result.")
    dist_init_addr: str | None = flag(
        None, help="HOST:PORT of node 0, where the nodes find each other."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgument(name, value, "must be at least 1.")
        if not 0 <= self.node_rank < self.nnodes:
            problem = f"must be 0 to {self.nnodes - 1}, for nnodes={self.nnodes}."
            raise InvalidArgument("node_rank", self.node_rank, problem)
        if self.dist_init_addr is not None:
            _host_and_port(self.dist_init_addr)
        elif self.nnodes > 1:
            problem = f"is needed with nnodes={self.nnodes}: HOST:PORT of node 0."
            raise InvalidArgument("dist_init_addr", None, problem)

    @property
    def init_address(self) -> tuple[str, int] | None:
        """Host and port of ``dist_init_addr``."""
        return None if self.dist_init_addr is None else _host_and_port(self.dist_init_addr)

    @property
    def layout(self) -> ParallelLayout:
        """The layout of the ranks; sizes that are left out count as 1."""
        ring = 1 if self.ring_degree is None else self.ring_degree
        return ParallelLayout(
            dp=self.dp_size,
            cfg=2 if self.enable_cfg_parallel else 1,
            ring=ring,
            ulysses=1 if self.ulysses_degree is None else self.ulysses_degree,
            tp=1 if self.tp_size is None else self.tp_size,
        )

    @property
    def ranks_here(self) -> range:
        """The ranks of this node."""
        local = self.layout.world_size // self.nnodes
        return range(local * self.node_rank, local * (self.node_rank + 1))


def _host_and_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host.strip() and port.isdecimal() and 0 < int(port) < 65536):
        problem = "must be HOST:PORT, such as 10.0.0.1:29500."
        raise InvalidArgument("dist_init_addr", text, problem)
    return host, int(port)
