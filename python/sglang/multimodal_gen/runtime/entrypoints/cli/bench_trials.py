"""What ``sglang bench step`` and ``sglang bench request`` share: one run, told in two ways."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen import __version__
from sglang.multimodal_gen.configs.sample.sampling_params import ImageSamplingParams
from sglang.multimodal_gen.runtime.entrypoints.cli.generate_options import sampling_params_class
from sglang.multimodal_gen.runtime.entrypoints.cli.report_file import report_file, write_report
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.bench_args import BenchTrialArgs
from sglang.multimodal_gen.runtime.server_args.flags import Flag, flags_of
from sglang.multimodal_gen.runtime.server_args.parser import FlagParser
from sglang.multimodal_gen.runtime.server_args.server_args import server_flags
from sglang.multimodal_gen.runtime.utils.atomic_file import check_output_folder
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, InvalidArgument, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from sglang.multimodal_gen.runtime.entrypoints.bench.trial import RuntimeSide, Side
    from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription

_WIDTH = 120
"""Of a table that no terminal shows: a file has no width, and digits are not to be cut."""

_COLUMNS = ("quartiles", "least-most", "ratio", "of floor", "peak GiB", "forwards")

_EXAMPLES = """\
Examples:
  sglang bench {command} --model-path demo
  sglang bench {command} --model-path FOLDER --random-weights --reference diffusers-compiled \\
      --output {command}.json --profile trace/"""


@dataclass(frozen=True, slots=True)
class Trials:
    """One of the two commands.

    Args:
        command: ``step`` or ``request``: what the table is about.
        about: its help.
        defaults: settings of the request that the command line may replace.
    """

    command: str
    about: str
    defaults: Mapping[str, Any]

    def run(self, argv: Sequence[str]) -> int:
        """Measure, print, write.

        Raises:
            UserError, CheckpointError: the model, a setting or the reference.
        """
        first = self._parser(ImageSamplingParams)
        said, _ = first.parse_known(argv)
        if "help" in said:
            first.print_help()
            return 0
        server = ServerArgs.from_flat(**first.values_of(said, server_flags()))
        family = sampling_params_class(server.model)
        parser = self._parser(family)
        said = parser.parse(argv)
        own = BenchTrialArgs(**parser.values_of(said, flags_of(BenchTrialArgs)))
        asked = parser.values_of(said, _sampling_flags(family))
        values = {"seed": 0, **self.defaults, **asked, "prompt": own.prompt}
        output, folder = report_file(own.output), _trace_folder(own.profile)
        from rich.console import Console

        report, ours = _measured(self.command, server, own, values, Console(stderr=True))
        _print(self.command, report)
        write_report(output, report)
        if folder is not None:  # last: whatever fails here, what was measured is told already
            from sglang.multimodal_gen.runtime.entrypoints.bench.profile import profiled

            report["profile"] = _plain(profiled(ours, folder))
            _print_profile(report["profile"])
            write_report(output, report)
        return 0

    def _parser(self, family: type) -> FlagParser:
        parser = FlagParser(
            f"sglang bench {self.command}",
            self.about,
            usage=f"sglang bench {self.command} [--model-path MODEL] [options]",
            epilog=_EXAMPLES.format(command=self.command),
        )
        parser.add_flags("measurement", flags_of(BenchTrialArgs), owner="BenchTrialArgs")
        title = f"request ({family.__name__})"
        parser.add_flags(title, _sampling_flags(family), owner=family.__name__)
        parser.add_flags("model and machine", server_flags(), owner="ServerArgs")
        return parser


def _trace_folder(said: str | None) -> Path | None:
    """The folder for a trace, made and tried; raises OutputError where it takes no files."""
    return None if said is None else check_output_folder(Path(said).expanduser())


def _sampling_flags(family: type) -> Sequence[Flag]:
    return flags_of(family, without=("prompt",))


def _measured(
    command: str,
    server: ServerArgs,
    own: BenchTrialArgs,
    values: Mapping[str, Any],
    console: Console,
) -> tuple[dict[str, Any], RuntimeSide]:
    """Everything that was measured, ready for JSON; and our side, which can run again."""
    from sglang.multimodal_gen.runtime.entrypoints.bench import profile
    from sglang.multimodal_gen.runtime.entrypoints.bench.sides import describe, our_side
    from sglang.multimodal_gen.runtime.entrypoints.bench.trial import measure, summary

    model = describe(server)
    model.admit(model.sampling_params(values))  # mistakes are told before weights are read
    floor = _floor(model, values, own.gpu)
    console.print(f"loading {model.source.name}", style="dim")
    begun = time.perf_counter()
    ours = our_side(model, values, random_weights=own.random_weights)
    load_seconds = time.perf_counter() - begun
    sides: list[Side] = [ours]
    notes: list[str] = []
    theirs = _reference(own, values, ours, notes)
    if theirs is not None:
        console.print(f"loaded {theirs.name} beside it", style="dim")
        sides.append(theirs)
    measure(sides, own.warm_up, own.rounds)
    rows = [summary(side, [s for s in sides if s is not side]) for side in sides]
    record: dict[str, Any] = {
        "command": command,
        "version": __version__,
        "machine": profile.machine(ours.device),
        "model": model.source.name,
        "random_weights": own.random_weights,
        "load_seconds": load_seconds,
        "settings": {k: v for k, v in values.items() if v is not None},
        "floor": floor,
        "sides": [_plain(row) for row in rows],
        "notes": notes,
    }
    _compare(record)
    return record, ours


def _reference(
    own: BenchTrialArgs,
    values: Mapping[str, Any],
    ours: RuntimeSide,
    notes: list[str],
) -> Side | None:
    """The other side; where it was not asked for and cannot be, a note says why."""
    if own.reference == "none" or ours.name != "sglang":
        return None
    from sglang.multimodal_gen.runtime.entrypoints.bench.library import their_side

    compiled = own.reference == "diffusers-compiled"
    try:
        return their_side(ours, values, random_weights=own.random_weights, compiled=compiled)
    except (UserError, CheckpointError) as error:
        if own.reference != "auto":
            raise
        notes.append(f"no reference: {error}")
        return None


def _floor(
    model: ModelDescription, values: Mapping[str, Any], gpu: str | None
) -> dict[str, Any] | None:
    """What products and attention alone take; None where nobody knows this machine's rates."""
    from sglang.multimodal_gen.runtime.planning.estimate import floor_of
    from sglang.multimodal_gen.runtime.planning.gpus import gpu_named
    from sglang.multimodal_gen.runtime.platforms.device import device_facts

    if model.info.backend != "sglang":
        return None
    facts = device_facts()
    name = facts.name if gpu is None and facts.cuda_available else gpu
    if name is None:
        return None
    try:
        rates = gpu_named(name)
    except InvalidArgument:
        if gpu is not None:
            raise
        return None
    return dataclasses.asdict(floor_of(model, values, rates))


def _compare(record: dict[str, Any]) -> None:
    """Ratios to the reference of the same run, and to the floor; whether the work was the same."""
    sides, floor = record["sides"], record["floor"]
    for name, least in (("step_ms", "step_seconds"), ("seconds", "seconds")):
        medians = [side[name] and side[name]["median"] for side in sides]
        for side, median in zip(sides, medians, strict=True):
            if median is None:
                continue
            if floor is not None:
                unit = 1e3 if name == "step_ms" else 1.0
                side[f"{name}_percent_of_floor"] = 100 * unit * floor[least] / median
            if len(sides) > 1 and side is sides[0] and medians[1] is not None:
                side[f"{name}_ratio"] = median / medians[1]
    counts = {side["forwards_a_step"] for side in sides}
    if len(counts) > 1:
        told = " and ".join(f"{count:g}" for count in sorted(counts))
        record["notes"].append(f"the sides differ in forwards a step: {told}")


def _print(command: str, report: Mapping[str, Any]) -> None:
    from rich.table import Table

    console = _console()
    machine, settings = report["machine"], report["settings"]
    told = ", ".join(f"{k} {v}" for k, v in settings.items())
    console.print(f"{report['model']} on {machine['device']}, torch {machine['torch']}: {told}")
    key, title = ("step_ms", "ms a step") if command == "step" else ("seconds", "s a request")
    table = Table(box=None, pad_edge=False)
    table.add_column("side", no_wrap=True)
    for column in (title, *_COLUMNS):
        table.add_column(column, justify="right", no_wrap=True)
    for side in report["sides"]:
        spread = side[key]
        if spread is None:
            table.add_row(side["name"], "-")
            continue
        first, third = spread["quartiles"]
        table.add_row(
            side["name"],
            f"{spread['median']:.4g}",
            f"{first:.4g}-{third:.4g}",
            f"{spread['low']:.4g}-{spread['high']:.4g}",
            _number(side.get(f"{key}_ratio"), "{:.3f}"),
            _number(side.get(f"{key}_percent_of_floor"), "{:.1f}%"),
            f"{side['peak_gib']:.2f}",
            f"{side['forwards_a_step']:g}",
        )
    console.print(table)
    console.print(f"loading {report['sides'][0]['name']}: {report['load_seconds']:.3g} s")
    firsts = (f"{side['name']} {side['first_seconds']:.3g} s" for side in report["sides"])
    console.print(f"first request, with what it waits for: {', '.join(firsts)}")
    for side in report["sides"] if command == "request" else ():
        parts = ", ".join(f"{name} {taken:.3f} s" for name, taken in side["stages"].items())
        console.print(f"{side['name']}: {parts}")
    for note in report["notes"]:
        console.print(f"note: {note}", style="dim")


def _print_profile(seen: Mapping[str, Any]) -> None:
    console = _console()
    waits = ", ".join(f"{count} {name}" for name, count in seen["waits"].items()) or "none"
    console.print(f"waits of the host in {seen['steps']} steps: {waits}")
    for row in seen["operations"][:10]:
        console.print(f"  {row['ms']:9.2f} ms {row['calls']:6d} x {row['name'][:70]}")


def _console() -> Console:
    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _plain(value: Any) -> Any:
    """Records as JSON's dicts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value
