"""``sglang models``: which families and paths are known; ``explain`` shows a pipeline's stages."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence

from sglang.multimodal_gen.runtime.server_args.parser import FlagParser

_WIDE = 200  # columns where nobody watches: a log or a pipe should get whole names


def run(argv: Sequence[str]) -> int:
    """List models, or explain one; returns the exit code."""
    if argv and argv[0] == "explain":
        return _explain(argv[1:])
    parser = FlagParser(
        "sglang models",
        "List the model families and paths known.",
        usage="sglang models [--json | --markdown]\n       sglang models explain NAME [--json]",
    )
    parser.add_switch("--json", "Print one line of JSON.")
    parser.add_switch("--markdown", "Print the Supported Models page of the documentation.")
    said = parser.parse(argv)
    if "help" in said:
        parser.print_help()
        return 0
    if "markdown" in said:
        if "json" in said:
            parser.error("--json and --markdown: which one?")
        from sglang.multimodal_gen.runtime.entrypoints.cli.catalogue import markdown

        print(markdown(), end="")
        return 0
    _list(as_json="json" in said)
    return 0


def _list(*, as_json: bool) -> None:
    from sglang.multimodal_gen.registry import known_models
    from sglang.multimodal_gen.runtime.loader.model_source import bundled_models

    models = known_models()
    if as_json:
        rows = [
            {
                "pipelines": list(known.pipelines),
                "paths": list(known.paths),
                "task_types": list(known.task_types),
                "sampling_params": known.sampling_params.__name__,
                "pipeline_config": known.pipeline_config.__name__,
            }
            for known in models
        ]
        print(json.dumps({"models": rows, "bundled": list(bundled_models())}))
        return
    _print_table(
        ("pipeline", "model path", "tasks", "sampling params"),
        (
            (
                "\n".join(known.pipelines),
                "\n".join(known.paths),
                ", ".join(known.task_types),
                known.sampling_params.__name__,
            )
            for known in models
        ),
    )
    print(f"bundled: {', '.join(bundled_models()) or 'none'}")
    print("Other checkpoints of these families load by folder or Hugging Face id; what no family")
    print("serves is run by its Diffusers pipeline, if it makes images (--backend diffusers).")


def _explain(argv: Sequence[str]) -> int:
    parser = FlagParser(
        "sglang models explain",
        "Show a pipeline's stages in running order, with the fields they read and write.",
        usage="sglang models explain NAME [--json]",
    )
    # Optional for argparse only, so that --help works alone.
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="A pipeline's name, or a model path."
    )
    parser.add_switch("--json", "Print one line of JSON.")
    said = vars(parser.parse(argv))
    if "help" in said:
        parser.print_help()
        return 0
    if said.get("name") is None:
        parser.error("which one? Give a name that 'sglang models' lists.")
    from sglang.multimodal_gen.runtime.entrypoints.cli.explained import explain

    rows = explain(said["name"])
    if "json" in said:
        print(json.dumps([dataclasses.asdict(row) for row in rows]))
        return 0
    _print_table(
        ("stage", "class", "role", "reads", "writes"),
        (
            (row.name, row.class_name, row.role, _fields(row.reads), _fields(row.writes))
            for row in rows
        ),
    )
    return 0


def _fields(names: Sequence[str] | None) -> str:
    return "(undeclared)" if names is None else ", ".join(names) or "-"


def _print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else _WIDE).print(table)
