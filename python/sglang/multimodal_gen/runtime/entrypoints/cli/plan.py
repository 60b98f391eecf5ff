"""``sglang plan``: what a request would take on a GPU that is not here."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.configs.sample.sampling_params import ImageSamplingParams
from sglang.multimodal_gen.runtime.entrypoints.cli.generate_options import sampling_params_class
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.flags import Flag, check_fields, flag, flags_of
from sglang.multimodal_gen.runtime.server_args.parser import FlagParser
from sglang.multimodal_gen.runtime.server_args.server_args import server_flags
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, UserError

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.planning.estimate import Estimate

_EXIT_DOES_NOT_FIT = 1
_GIB = 1 << 30
_WIDE = 200
_MODEL_FLAGS = ("--model-path", "--model_path")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanArgs:
    """What the command itself takes."""

    gpu: str = flag("h200", help="The GPU to plan for; a name that is not known lists the others.")
    host_memory_gib: float | None = flag(
        None, help="Host memory of that machine in GiB; by default what is free on this one."
    )
    prompt: str = flag("a", help="Its length does not matter: prompts are padded.")
    json: bool = flag(False, help="Print the plan as JSON on standard output.")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.host_memory_gib is not None and self.host_memory_gib <= 0:
            raise InvalidArgument("host_memory_gib", self.host_memory_gib, "must be above 0")


def run(argv: Sequence[str]) -> int:
    """Run the command: 0 if the request fits into the GPU, 1 if not."""
    argv = _with_flag(argv)
    first = _parser(ImageSamplingParams)
    said, _ = first.parse_known(argv)
    if "help" in said:
        first.print_help()
        return 0
    server = ServerArgs.from_flat(**first.values_of(said, server_flags()))
    family = sampling_params_class(server.model)
    parser = _parser(family)
    said = parser.parse(argv)
    own = PlanArgs(**parser.values_of(said, flags_of(PlanArgs)))
    sampling = parser.values_of(said, _sampling_flags(family))
    from sglang.multimodal_gen.runtime.planning.estimate import estimate
    from sglang.multimodal_gen.runtime.planning.gpus import gpu_named

    gpu = gpu_named(own.gpu)
    plan = estimate(server, {**sampling, "prompt": own.prompt}, gpu, own.host_memory_gib)
    if own.json:
        print(json.dumps(_record(plan)))
    else:
        _print(plan)
    return 0 if plan.fits else _EXIT_DOES_NOT_FIT


def _with_flag(argv: Sequence[str]) -> list[str]:
    """``sglang plan MODEL ...`` as ``sglang plan --model-path MODEL ...``.

    The name comes first: further on it could be the value of a flag that only its family knows.
    """
    if not argv or argv[0].startswith("-"):
        return list(argv)
    named, *rest = argv
    if any(word.partition("=")[0] in _MODEL_FLAGS for word in rest):
        raise UserError(f"the model is named twice: {named!r} and by --model-path. Name it once.")
    return ["--model-path", named, *rest]


def _sampling_flags(family: type) -> Sequence[Flag]:
    return flags_of(family, without=("prompt",))


def _parser(family: type) -> FlagParser:
    parser = FlagParser(
        "sglang plan",
        "Say what a request would take on a GPU: memory by component and stage, time by roofline. "
        "Reads configs and safetensors headers alone; needs no GPU.",
        usage="sglang plan [MODEL] [--gpu NAME] [options]",
        epilog="Exit code 1 if it does not fit.\n"
        "Example: sglang plan ORG/MODEL --gpu rtx-4090 --width 1536",
    )
    parser.add_flags("where", flags_of(PlanArgs), owner="sglang plan")
    parser.add_flags(f"what ({family.__name__})", _sampling_flags(family), owner=family.__name__)
    parser.add_flags("model and machine", server_flags(), owner="ServerArgs")
    return parser


def _record(plan: Estimate) -> dict[str, Any]:
    stages = [dataclasses.asdict(s) | {"bytes": s.bytes} for s in plan.stages]
    return {
        "model": plan.model,
        "gpu": plan.gpu.name,
        "settings": dict(plan.settings),
        "components": [dataclasses.asdict(component) for component in plan.components],
        "stages": stages,
        "steps": plan.steps,
        "step_seconds": plan.step_seconds,
        "seconds": plan.seconds,
        "peak_bytes": plan.peak_bytes,
        "host_bytes": plan.host_bytes,
        "fits": plan.fits,
        "notes": list(plan.notes),
    }


def _print(plan: Estimate) -> None:
    from rich.console import Console
    from rich.table import Table

    # A terminal has a width of its own; what reads a file or pipe wants whole lines.
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDE)
    settings = ", ".join(f"{name} {value}" for name, value in plan.settings.items())
    console.print(f"{plan.model} on one {plan.gpu.name} ({plan.gpu.gib:.0f} GiB): {settings}")
    weights = Table(box=None, pad_edge=False)
    for title in ("component", "weights", "rests"):
        weights.add_column(title, justify="right" if title == "weights" else "left")
    for component in plan.components:
        weights.add_row(component.name, _size(component.nbytes), component.place)
    console.print(weights)
    table = Table(box=None, pad_edge=False)
    for title in ("stage", "weights", "activations", "TFLOP", "time"):
        table.add_column(title, justify="left" if title == "stage" else "right")
    for stage in plan.stages:
        hidden = f" ({_time(stage.transfer_seconds)} of it waiting for weights)"
        waits = hidden if stage.transfer_seconds > 0.0005 else ""
        table.add_row(
            stage.name, _size(stage.weight_bytes), _size(stage.activation_bytes),
            f"{stage.tera_operations:.1f}", _time(stage.seconds) + waits,
        )  # fmt: skip
    console.print(table)
    verdict = "fits" if plan.fits else f"does not fit into {_size(plan.gpu.usable_bytes)}"
    console.print(
        f"peak {_size(plan.peak_bytes)} on the GPU ({verdict}), {_size(plan.host_bytes)} in the "
        f"host; about {_time(plan.seconds)} in all, {_time(plan.step_seconds)} a step"
    )
    for note in plan.notes:
        console.print(f"note: {note}", style="dim")


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB" if nbytes >= _GIB / 10 else f"{nbytes / (1 << 20):.1f} MiB"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
