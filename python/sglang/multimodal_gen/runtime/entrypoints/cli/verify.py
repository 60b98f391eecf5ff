"""``sglang verify``: is this family's port right? A table of checks, and why it is not."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
from sglang.multimodal_gen.runtime.server_args.parser import FlagParser
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument, OutputError

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.server_args import ServerArgs
    from sglang.multimodal_gen.runtime.verify.verification import Row, Verification, Wish

_EXIT_FAILED = 1
_SIZE = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})")
_WIDE = 200
_SERVER_FLAGS = ("revision", "model_id", "pipeline_class_name", "device")


def run(argv: Sequence[str]) -> int:
    """Run the command: 0 if the port is right, 1 if a check fails; prints a table."""
    parser = _parser()
    said = vars(parser.parse(argv))
    if "help" in said:
        parser.print_help()
        return 0
    if said.get("model") is None:
        parser.error("which model? A bundled name, a folder, or a Hugging Face id.")
    report = Path(said["json"]) if "json" in said else None
    if report is not None and not report.absolute().parent.is_dir():
        raise OutputError(f"--json {report}: there is no folder {report.absolute().parent}.")
    if report is not None and report.is_dir():
        raise OutputError(f"--json {report}: is a folder; give the file to write.")
    return _verify(parser, said, report)


def _parser() -> FlagParser:
    parser = FlagParser(
        "sglang verify",
        "Compare a native family with its reference, step by step, and its mechanisms with the "
        "plain run.",
        usage="sglang verify MODEL [options]",
        epilog="Stops at the first check that fails, with the likely cause. Exit code 1 then.",
    )
    # Optional for argparse only, so that --help works alone.
    parser.add_argument("model", nargs="?", metavar="MODEL", help="Name, folder or id of a model.")
    parser.add_argument(
        "--reference", metavar="REFERENCE",
        help="'diffusers' (default): the pipeline that model_index.json names. MODULE:CLASS: the "
        "model's own. 'none': the mechanisms alone.",
    )  # fmt: skip
    parser.add_argument(
        "--checks", metavar="NAME,NAME", help="These checks only; 'list' prints their names."
    )
    parser.add_argument("--json", metavar="FILE", help="Write the whole report there.")
    parser.add_argument(
        "--size", nargs="+", metavar="HxW",
        help="Heights and widths in pixels; a small square and a wide one by default.",
    )  # fmt: skip
    parser.add_argument(
        "--weights", choices=("tiny", "real"),
        help="'tiny' (default): random ones, from the checkpoint's own configs with fewer layers "
        "and smaller widths. 'real': the checkpoint's.",
    )  # fmt: skip
    parser.add_argument("--seed", metavar="SEED", help="Seed of the request (default: 5).")
    parser.add_flags("model", _server_flags(), owner="ServerArgs")
    return parser


def _server_flags() -> list[Any]:
    from sglang.multimodal_gen.runtime.server_args.server_args import server_flags

    return [spec for spec in server_flags() if spec.name in _SERVER_FLAGS]


def _verify(parser: FlagParser, said: dict[str, Any], report: Path | None) -> int:
    import argparse

    sizes = tuple(_size(text) for text in said.get("size", ()))
    values = parser.values_of(argparse.Namespace(**said), _server_flags())
    from sglang.multimodal_gen.runtime.verify.verification import check_names, verify

    if said.get("checks") == "list":
        print("\n".join(check_names()))
        return 0
    wish = _wish(said, sizes)
    start = time.perf_counter()
    done = verify(_server_args(said["model"], values), wish, _Said(start))
    _print_table(done)
    seconds = time.perf_counter() - start
    if report is not None:
        _write_report(report, done, seconds)
    _print_verdict(done, seconds)
    return 0 if done.passed else _EXIT_FAILED


def _wish(said: dict[str, Any], sizes: tuple[tuple[int, int], ...]) -> Wish:
    from sglang.multimodal_gen.runtime.verify.verification import Wish

    wished: dict[str, Any] = {"sizes": sizes}
    for name in ("reference", "weights"):
        if name in said:
            wished[name] = said[name]
    if "checks" in said:
        names = tuple(name.strip() for name in said["checks"].split(","))
        wished["checks"] = names
    if "seed" in said:
        if not said["seed"].isdecimal():
            raise InvalidArgument("--seed", said["seed"], "must be a whole number, 0 or more")
        wished["seed"] = int(said["seed"])
    return Wish(**wished)


def _server_args(model: str, values: dict[str, Any]) -> ServerArgs:
    from sglang.multimodal_gen.runtime.models.external_packages import load_external_packages
    from sglang.multimodal_gen.runtime.platforms.device import device_facts
    from sglang.multimodal_gen.runtime.server_args import ServerArgs
    from sglang.multimodal_gen.runtime.server_args.resolve import resolve

    load_external_packages()
    args = ServerArgs.from_flat(model_path=model, precision="fp32", **values)
    return resolve(args, device_facts()).args


def _size(text: str) -> tuple[int, int]:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InvalidArgument("--size", text, "must be HEIGHTxWIDTH in pixels, such as 64x96")
    height, width = int(match[1]), int(match[2])
    if height * width > PipelineConfig.max_pixels:
        problem = f"{height * width} pixels; at most {PipelineConfig.max_pixels} are checked"
        raise InvalidArgument("--size", text, problem)
    return height, width


class _Said:
    """Progress on standard error: a line for each thing that begins."""

    def __init__(self, start: float) -> None:
        self.start = start

    def __call__(self, what: str) -> None:
        seconds = time.perf_counter() - self.start
        print(f"[{seconds:5.1f} s] {what}", file=sys.stderr, flush=True)


def _print_table(done: Verification) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("check", "error", "bound", "verdict", ""):
        table.add_column(title, overflow="fold")
    for row in done.rows:
        cells = (row.title, _number(row.error), _number(row.bound), row.verdict, row.detail)
        table.add_row(*(Text(cell) for cell in cells))
    Console(width=None if sys.stdout.isatty() else _WIDE).print(table)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _print_verdict(done: Verification, seconds: float) -> None:
    sizes = " and ".join(f"{height}x{width}" for height, width in done.sizes)
    print(
        f"{done.pipeline} against {done.reference}, weights {done.weights}, {sizes}, fp32, "
        f"{seconds:.1f} s"
    )
    if done.cause is not None:
        print(f"likely cause: {done.cause}")
    ok = sum(row.verdict == "ok" for row in done.rows)
    skipped = sum(row.verdict in ("not supported here", "not compared") for row in done.rows)
    if done.passed:
        print(f"passed: {ok} checks; {skipped} not made")
    else:
        print(f"FAILED: {done.failed or 'nothing was checked'}")


def _write_report(path: Path, done: Verification, seconds: float) -> None:
    cause = None if done.cause is None else {
        "failure": str(done.cause.failure), "because": done.cause.because,
    }  # fmt: skip
    report = {
        "model": done.model,
        "pipeline": done.pipeline,
        "reference": done.reference,
        "weights": done.weights,
        "sizes": [f"{height}x{width}" for height, width in done.sizes],
        "precision": "fp32",
        "passed": done.passed,
        "cause": cause,
        "seconds": seconds,
        "versions": _versions(),
        "checks": [_json_row(row) for row in done.rows],
    }
    try:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--json {path} cannot be written: {error.strerror}") from error


def _json_row(row: Row) -> dict[str, Any]:
    """JSON has no infinity: an error without a number is text."""
    values = dataclasses.asdict(row)
    if row.error is not None and not math.isfinite(row.error):
        values["error"] = "infinite"
    return values


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "diffusers", "transformers")}
