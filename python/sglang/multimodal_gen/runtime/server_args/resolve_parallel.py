"""Turns the sizes that were said into a whole layout, and says why; the arithmetic of many ranks.

Pure, as `resolve` is: what the machine has and what started this process are arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import gcd, prod

from sglang.multimodal_gen.runtime.platforms.device import DeviceFacts
from sglang.multimodal_gen.runtime.server_args.parallel_args import ParallelArgs
from sglang.multimodal_gen.runtime.utils.environ import LaunchedRank
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

RANK_BYTES = 2**30
"""Host memory of a rank on a CPU: torch and the libraries take half of it."""


def resolve_parallel(
    args: ParallelArgs,
    device: str,
    facts: DeviceFacts,
    launched: LaunchedRank | None,
    notes: list[str],
) -> ParallelArgs:
    """The arguments with every size set; one sentence is added to ``notes`` for each choice.

    ``launched`` is this process's place where torchrun started it.

    Raises:
        InvalidArgument: the sizes do not multiply to the ranks, or the machine has too few GPUs.
    """
    total = _told_total(args, launched, notes)
    said = {
        "dp_size": args.dp_size,
        "enable_cfg_parallel": 2 if args.enable_cfg_parallel else 1,
        "tp_size": 1 if args.tp_size is None else args.tp_size,
    }
    ulysses, ring = _sequence(args, total, said, notes)
    terms = said | {"ulysses_degree": ulysses, "ring_degree": ring}
    product = prod(terms.values())
    if total is None:
        total = product
        if product > 1:
            notes.append(f"num_gpus={product}: as many ranks as {_shown(terms)} need")
    elif product != total:
        raise _mismatch(total, _as_said(args, terms))
    chosen = dataclasses.replace(
        args,
        num_gpus=total,
        tp_size=said["tp_size"],
        sp_degree=ulysses * ring,
        ulysses_degree=ulysses,
        ring_degree=ring,
    )
    _check_machine(chosen, total, device, facts, launched)
    return chosen


def _told_total(args: ParallelArgs, launched: LaunchedRank | None, notes: list[str]) -> int | None:
    """The number of ranks, if it is known before the sizes are."""
    if launched is None:
        return args.num_gpus
    world = launched.world_size
    for name, value, default in (
        ("nnodes", args.nnodes, 1),
        ("dist_init_addr", args.dist_init_addr, None),
    ):
        if value != default:
            problem = "is for commands started by hand; torchrun already says where each runs."
            raise InvalidArgument(name, value, problem)
    if args.num_gpus is None:
        notes.append(f"num_gpus={world}: torchrun started as many processes")
    elif args.num_gpus != world:
        problem = f"torchrun started {world} processes; leave it out, or start as many."
        raise InvalidArgument("num_gpus", args.num_gpus, problem)
    return world


def fit_heads(
    asked: ParallelArgs, resolved: ParallelArgs, heads: Sequence[int]
) -> tuple[ParallelArgs, tuple[str, ...]]:
    """The layout once the model is known: a Ulysses degree that was chosen must divide its heads.

    ``heads`` are those of each denoiser. What was asked for stays, and is refused later if it does
    not divide. Returns the arguments, and a sentence if they changed.
    """
    ulysses, ring, tp = (resolved.ulysses_degree, resolved.ring_degree, resolved.tp_size)
    if asked.ulysses_degree is not None or asked.ring_degree is not None or ulysses is None:
        return resolved, ()
    local = [number // (tp or 1) for number in heads]
    fitting = gcd(ulysses, *local)
    if fitting == ulysses:
        return resolved, ()
    ring = ulysses // fitting * (ring or 1)
    note = (
        f"ulysses_degree={fitting} and ring_degree={ring} in place of ulysses_degree={ulysses}: "
        f"the model has {' and '.join(map(str, heads))} attention heads"
    )
    return dataclasses.replace(resolved, ulysses_degree=fitting, ring_degree=ring), (note,)


def _sequence(
    args: ParallelArgs, total: int | None, said: dict[str, int], notes: list[str]
) -> tuple[int, int]:
    """Ulysses and ring degrees."""
    ulysses, ring, sp = args.ulysses_degree, args.ring_degree, args.sp_degree
    if ulysses is not None and ring is not None:
        if sp not in (None, ulysses * ring):
            problem = f"ulysses_degree={ulysses} x ring_degree={ring} = {ulysses * ring}, not {sp}."
            raise InvalidArgument("sp_degree", sp, problem)
        return ulysses, ring
    origin = f"sp_degree={sp}"
    if sp is None and total is not None:
        others = prod(said.values())
        if total % others:
            raise _mismatch(total, _as_said(args, said))
        sp, origin = total // others, f"num_gpus={total}"
    if ulysses is None and ring is None:
        return _all_by_heads(sp, origin, said, notes), 1
    given, known = ("ulysses_degree", ulysses) if ring is None else ("ring_degree", ring)
    assert known is not None
    if sp is None:
        sp = known
    if sp % known:
        if args.sp_degree is None and total is not None:
            raise _mismatch(total, _as_said(args, said))
        raise InvalidArgument("sp_degree", sp, f"does not divide by {given}={known}.")
    rest = sp // known
    other = "ring_degree" if ring is None else "ulysses_degree"
    if rest > 1:
        notes.append(f"{origin}: {other}={rest} chosen, what {given}={known} leaves")
    return (known, rest) if ring is None else (rest, known)


def _all_by_heads(sp: int | None, origin: str, said: dict[str, int], notes: list[str]) -> int:
    """The Ulysses degree where neither it nor the ring's was said."""
    if sp is None or sp == 1:
        return 1
    beside = _shown(said)
    notes.append(
        f"{origin}: ulysses_degree={sp} chosen{f' beside {beside}' if beside else ''}, all ranks "
        "on one picture with little traffic; --tp-size saves memory, --enable-cfg-parallel and "
        "--dp-size need less traffic still"
    )
    return sp


def _check_machine(
    args: ParallelArgs, total: int, device: str, facts: DeviceFacts, launched: LaunchedRank | None
) -> None:
    if total % args.nnodes:
        raise InvalidArgument("num_gpus", total, f"does not divide over nnodes={args.nnodes}.")
    here = total // args.nnodes if launched is None else launched.local_world_size
    if device != "cuda":
        _check_processes(total, here, facts)
        return
    if here <= max(facts.device_count, 1):
        return
    share = "" if here == total else f" ({here} of them on each node)"
    problem = f"this machine has {facts.device_count} GPUs{share}. Use --device cpu, or fewer."
    raise InvalidArgument("num_gpus", total, problem)


def _check_processes(total: int, here: int, facts: DeviceFacts) -> None:
    """Ranks on a CPU are processes, and too many take the machine down with them."""
    most = max(1, facts.memory_bytes // RANK_BYTES)
    if facts.cuda_available or here <= most:
        return
    problem = (
        f"each rank on a CPU is a process of half a GiB or more, and this machine's "
        f"{facts.memory_bytes / 2**30:.0f} GiB hold {most}. Use fewer."
    )
    raise InvalidArgument("num_gpus", total, problem)


def _as_said(args: ParallelArgs, terms: dict[str, int]) -> dict[str, int]:
    """The sizes under the names that the user gave."""
    kept = {n: v for n, v in terms.items() if n not in ("ulysses_degree", "ring_degree")}
    parts = {n: v for n in ("ulysses_degree", "ring_degree") if (v := getattr(args, n)) is not None}
    if args.sp_degree is not None and len(parts) < 2:
        parts = {"sp_degree": args.sp_degree}
    return kept | parts


def _mismatch(total: int, terms: dict[str, int]) -> InvalidArgument:
    product = prod(terms.values())
    result = f" = {product}" if sum(size > 1 for size in terms.values()) > 1 else ""
    why = f"{_shown(terms) or 'the sizes are 1'}{result}, but num_gpus={total}"
    if product < total and total % product == 0:
        remedy = f"Give --num-gpus {product}, or --dp-size {total // product * terms['dp_size']}."
    else:
        remedy = f"Give --num-gpus {product}, or leave sizes out."
    return InvalidArgument("num_gpus", total, f"{why}. {remedy}")


def _shown(terms: dict[str, int]) -> str:
    """``tp_size=2 x sp_degree=3``, without those of size 1."""
    names = [
        f"{name} (2)" if name == "enable_cfg_parallel" else f"{name}={size}"
        for name, size in terms.items()
        if size > 1
    ]
    return " x ".join(names)
