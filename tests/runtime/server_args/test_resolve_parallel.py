import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.multimodal_gen.runtime.platforms.device import DeviceFacts
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.parallel_args import ParallelArgs
from sglang.multimodal_gen.runtime.server_args.resolve import resolve
from sglang.multimodal_gen.runtime.server_args.resolve_parallel import fit_heads
from sglang.multimodal_gen.runtime.utils.environ import LaunchedRank
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

CPU = DeviceFacts(cuda_available=False, device_count=0, name="x86_64", memory_bytes=2**34)
FOUR_GPUS = DeviceFacts(cuda_available=True, device_count=4, name="Fast", memory_bytes=80 * 2**30)
SHAPE = ("dp", "cfg", "ring", "ulysses", "tp")
NODES = {"nnodes": 2, "dist_init_addr": "10.0.0.1:29500"}


def torchrun(world: int, local: int | None = None, rank: int = 0) -> LaunchedRank:
    return LaunchedRank(rank, world, rank, world if local is None else local, "10.0.0.1")


def resolved(facts: DeviceFacts = CPU, launched: LaunchedRank | None = None, **said: object):
    device = "cuda" if facts.cuda_available else "cpu"
    args = ServerArgs.from_flat(device=device, precision="fp32", **said)
    return resolve(args, facts, launched)


@pytest.mark.parametrize(
    ("said", "shape"),
    [
        ({}, (1, 1, 1, 1, 1)),
        ({"num_gpus": 1}, (1, 1, 1, 1, 1)),
        ({"num_gpus": 4}, (1, 1, 1, 4, 1)),
        ({"num_gpus": 4, "tp_size": 2}, (1, 1, 1, 2, 2)),
        ({"num_gpus": 4, "tp_size": 4}, (1, 1, 1, 1, 4)),
        ({"num_gpus": 4, "sp_degree": 4}, (1, 1, 1, 4, 1)),
        ({"num_gpus": 4, "ring_degree": 4}, (1, 1, 4, 1, 1)),
        ({"num_gpus": 4, "ring_degree": 2}, (1, 1, 2, 2, 1)),
        ({"num_gpus": 4, "ulysses_degree": 2}, (1, 1, 2, 2, 1)),
        ({"num_gpus": 4, "enable_cfg_parallel": True}, (1, 2, 1, 2, 1)),
        ({"num_gpus": 8, "dp_size": 2, "tp_size": 2}, (2, 1, 1, 2, 2)),
        ({"tp_size": 2}, (1, 1, 1, 1, 2)),
        ({"dp_size": 2, "enable_cfg_parallel": True, "ring_degree": 3}, (2, 2, 3, 1, 1)),
        ({"sp_degree": 6, "ulysses_degree": 2}, (1, 1, 3, 2, 1)),
        ({"sp_degree": 6, "ring_degree": 2, "ulysses_degree": 3}, (1, 1, 2, 3, 1)),
    ],
)
def test_what_was_left_out_is_chosen(said, shape):
    args = resolved(**said).args.parallel
    assert tuple(getattr(args.layout, name) for name in SHAPE) == shape
    assert args.num_gpus == args.layout.world_size


def test_each_choice_is_one_sentence_and_what_was_said_is_none():
    assert resolved().notes == ()
    assert resolved(num_gpus=4, tp_size=4).notes == ()
    (note,) = resolved(num_gpus=4).notes
    assert note.startswith("num_gpus=4: ulysses_degree=4 chosen, ")
    (note,) = resolved(num_gpus=8, tp_size=2, dp_size=2).notes
    assert note.startswith("num_gpus=8: ulysses_degree=2 chosen beside dp_size=2 x tp_size=2, ")
    assert resolved(num_gpus=4, ring_degree=2).notes == (
        "num_gpus=4: ulysses_degree=2 chosen, what ring_degree=2 leaves",
    )
    assert resolved(tp_size=2, dp_size=2).notes == (
        "num_gpus=4: as many ranks as dp_size=2 x tp_size=2 need",
    )


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"num_gpus": 4, "tp_size": 2, "sp_degree": 3},
            "num_gpus=4: tp_size=2 x sp_degree=3 = 6, but num_gpus=4. Give --num-gpus 6,",
        ),
        ({"num_gpus": 4, "tp_size": 3}, "num_gpus=4: tp_size=3, but num_gpus=4."),
        ({"num_gpus": 4, "sp_degree": 2}, "num_gpus=4: sp_degree=2, but num_gpus=4. Give --num-gp"),
        (
            {"num_gpus": 8, "ulysses_degree": 2, "ring_degree": 2},
            "num_gpus=8: ulysses_degree=2 x ring_degree=2 = 4, but num_gpus=8. Give --num-gpus 4, "
            "or --dp-size 2.",
        ),
        (
            {"num_gpus": 6, "enable_cfg_parallel": True, "tp_size": 2},
            "num_gpus=6: enable_cfg_parallel (2) x tp_size=2 = 4, but num_gpus=6.",
        ),
        ({"num_gpus": 1, "enable_cfg_parallel": True}, "num_gpus=1: enable_cfg_parallel (2), but"),
        ({"num_gpus": 1, "dp_size": 2}, "num_gpus=1: dp_size=2, but num_gpus=1."),
        (
            {"sp_degree": 8, "ulysses_degree": 2, "ring_degree": 2},
            "sp_degree=8: ulysses_degree=2 x ring_degree=2 = 4, not 8.",
        ),
        ({"sp_degree": 4, "ring_degree": 3}, "sp_degree=4: does not divide by ring_degree=3."),
        ({"num_gpus": 3, **NODES}, "num_gpus=3: does not divide over nnodes=2."),
        ({"nnodes": 2}, "dist_init_addr=None: is needed with nnodes=2: HOST:PORT of node 0."),
        ({**NODES, "node_rank": 2}, "node_rank=2: must be 0 to 1, for nnodes=2."),
        ({"node_rank": -1}, "node_rank=-1: must be 0 to 0, for nnodes=1."),
        ({"dist_init_addr": "10.0.0.1"}, "dist_init_addr='10.0.0.1': must be HOST:PORT"),
        ({"dist_init_addr": ":29500"}, "dist_init_addr=':29500': must be HOST:PORT"),
        ({"dist_init_addr": "a:99999"}, "dist_init_addr='a:99999': must be HOST:PORT"),
        ({"tp_size": 0}, "tp_size=0: must be at least 1."),
        ({"num_gpus": -2}, "num_gpus=-2: must be at least 1."),
        ({"num_gpus": 2, "backend": "diffusers"}, "num_gpus=2: a model that runs through Diff"),
    ],
)
def test_what_does_not_multiply_is_refused_with_the_arithmetic(said, message):
    with pytest.raises(InvalidArgument) as raised:
        resolved(**said)
    assert str(raised.value).startswith(message)


def test_a_machine_with_too_few_gpus_is_refused():
    assert resolved(FOUR_GPUS, num_gpus=4).args.parallel.num_gpus == 4
    assert resolved(FOUR_GPUS, num_gpus=8, **NODES).args.parallel.num_gpus == 8
    assert resolved(CPU, num_gpus=8).args.parallel.num_gpus == 8, "processes are no GPUs"
    with pytest.raises(InvalidArgument, match=r"^num_gpus=5: this machine has 4 GPUs\. Use"):
        resolved(FOUR_GPUS, num_gpus=5)
    with pytest.raises(InvalidArgument, match=r"has 4 GPUs \(5 of them on each node\)"):
        resolved(FOUR_GPUS, num_gpus=10, **NODES)
    with pytest.raises(InvalidArgument, match=r"^num_gpus=8: this machine has 4 GPUs"):
        resolved(FOUR_GPUS, torchrun(8))
    assert resolved(FOUR_GPUS, torchrun(8, local=4)).args.parallel.num_gpus == 8


def test_what_torchrun_started_is_taken():
    result = resolved(CPU, torchrun(4), tp_size=2)
    assert result.args.parallel.num_gpus == 4
    assert result.notes[0] == "num_gpus=4: torchrun started as many processes"
    assert resolved(CPU, torchrun(1)).args.parallel.num_gpus == 1
    with pytest.raises(InvalidArgument, match=r"^num_gpus=2: torchrun started 4 processes"):
        resolved(CPU, torchrun(4), num_gpus=2)
    with pytest.raises(InvalidArgument, match=r"^nnodes=2: is for commands started by hand"):
        resolved(CPU, torchrun(4), **NODES)
    with pytest.raises(InvalidArgument, match=r"^dist_init_addr='a:1': is for commands"):
        resolved(CPU, torchrun(4), dist_init_addr="a:1")


def test_each_node_knows_its_ranks_and_where_the_others_are():
    args = resolved(num_gpus=6, **NODES, node_rank=1).args.parallel
    assert list(args.ranks_here) == [3, 4, 5]
    assert args.init_address == ("10.0.0.1", 29500)
    assert ParallelArgs(dist_init_addr="[::1]:80").init_address == ("::1", 80)
    assert ParallelArgs().init_address is None


degrees = st.none() | st.integers(1, 8)
anything = st.fixed_dictionaries(
    {},
    optional={
        "num_gpus": st.none() | st.integers(0, 16),
        "tp_size": degrees,
        "sp_degree": degrees,
        "ulysses_degree": degrees,
        "ring_degree": degrees,
        "enable_cfg_parallel": st.booleans(),
        "dp_size": st.integers(1, 4),
        "nnodes": st.integers(1, 3),
        "node_rank": st.integers(0, 3),
        "dist_init_addr": st.none() | st.just("node:29500"),
    },
)
SIZES = ("num_gpus", "tp_size", "sp_degree", "ulysses_degree", "ring_degree", "dp_size")


@given(
    said=anything, facts=st.sampled_from([CPU, FOUR_GPUS]), started=st.sampled_from([0, 1, 2, 4])
)
def test_any_sizes_are_a_layout_or_refused(said, facts, started):
    launched = torchrun(started) if started else None
    try:
        result = resolved(facts, launched, **said)
    except InvalidArgument:
        return
    args = result.args.parallel
    assert args.layout.world_size == args.num_gpus
    assert args.sp_degree == args.ulysses_degree * args.ring_degree
    assert {k: getattr(args, k) for k, v in said.items() if v is not None} == {
        k: v for k, v in said.items() if v is not None
    }, "nothing that was said is changed"
    for name in SIZES:
        chosen = getattr(args, name)
        if said.get(name) is None and chosen > 1 and name != "sp_degree":
            assert any(f"{name}={chosen}" in note for note in result.notes)
    assert all("\n" not in note and note.strip() for note in result.notes)
    again = resolve(result.args, facts, launched)
    assert again.args == result.args
    assert again.notes == ()


@pytest.mark.parametrize(
    ("asked", "ulysses", "heads", "expected"),
    [
        ({"num_gpus": 4}, 4, [24], (4, 1)),
        ({"num_gpus": 2}, 2, [5], (1, 2)),
        ({"num_gpus": 4}, 4, [6], (2, 2)),
        ({"num_gpus": 4}, 4, [24, 6], (2, 2)),
        ({"num_gpus": 4}, 4, [], (4, 1)),
        ({"ulysses_degree": 2}, 2, [5], (2, 1)),
    ],
)
def test_a_chosen_ulysses_degree_fits_the_heads(asked, ulysses, heads, expected):
    """What was asked for stays, to be refused by name where it cannot be."""
    resolved = ParallelArgs(num_gpus=ulysses, ulysses_degree=ulysses, ring_degree=1, tp_size=1)
    fitted, notes = fit_heads(ParallelArgs(**asked), resolved, heads)
    assert (fitted.ulysses_degree, fitted.ring_degree) == expected
    assert fitted.layout.world_size == ulysses
    assert len(notes) == (fitted != resolved)


def test_heads_are_counted_on_a_rank_of_tensor_parallelism():
    resolved = ParallelArgs(num_gpus=4, ulysses_degree=2, ring_degree=1, tp_size=2)
    fitted, notes = fit_heads(ParallelArgs(num_gpus=4, tp_size=2), resolved, [6])
    assert (fitted.ulysses_degree, fitted.ring_degree, fitted.tp_size) == (1, 2, 2)
    assert "6 attention heads" in notes[0]


def test_more_ranks_than_the_machine_can_hold_are_refused():
    """A hundred processes of half a GiB each took a machine of 24 GiB down for minutes."""
    with pytest.raises(InvalidArgument, match=r"num_gpus=100: .*16 GiB hold 16"):
        resolved(num_gpus=100)
    assert resolved(num_gpus=16).args.parallel.num_gpus == 16
