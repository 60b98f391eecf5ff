"""``sglang serve``: a model behind OpenAI's API."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.multimodal_gen.runtime.entrypoints.cli.config_file import ConfigFile
from sglang.multimodal_gen.runtime.entrypoints.http.listening import listen
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.flags import Flag, flags_of
from sglang.multimodal_gen.runtime.server_args.parser import FlagParser
from sglang.multimodal_gen.runtime.server_args.server_args import server_flags
from sglang.multimodal_gen.runtime.server_args.serving import SECTIONS, ServingArgs

_TITLES = {
    "http": "where to listen",
    "queue": "how requests wait",
    "limits": "the most that one request may ask for",
    "keep": "what is kept, and for how long",
    "store": "what survives the server",
    "guard": "who may ask, and how much",
    "fetch": "input pictures by URL",
    "seeing": "what the server tells of its work",
}


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code when the server was told to stop."""
    options = read_options(argv)
    if options is None:
        return 0
    server_args, serving = options
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("sglang").setLevel(server_args.observe.log_level.upper())
    with contextlib.closing(listen(serving.http)) as listener:
        # Slow to import; who is told that the port is taken should not have to wait for it.
        from sglang.multimodal_gen.runtime.entrypoints.http.server import serve

        return serve(server_args, serving, listener, tell=_tell)


def _tell(sentence: str) -> None:
    print(f"sglang: {sentence}", file=sys.stderr, flush=True)


def read_options(argv: Sequence[str]) -> tuple[ServerArgs, ServingArgs] | None:
    """The options of a command line; None when ``--help`` was asked for, and printed.

    Raises:
        UserError: an unknown flag or setting, or a refused value.
    """
    parser = _parser()
    said = parser.parse(argv)
    if "help" in said:
        parser.print_help()
        return None
    path = vars(said).get("config")
    config = None if path is None else ConfigFile(Path(path))
    model_flags, own_flags = server_flags(), serving_flags()
    if config is not None:
        config.check_keys((*model_flags, *own_flags))

    def values(flags: Sequence[Flag]) -> dict[str, Any]:
        filed = {} if config is None else config.values_of(flags)
        return filed | parser.values_of(said, flags)

    return ServerArgs.from_flat(**values(model_flags)), ServingArgs.from_flat(**values(own_flags))


def serving_flags() -> tuple[Flag, ...]:
    """The flags that are this command's own."""
    return tuple(spec for section in SECTIONS.values() for spec in flags_of(section))


def _parser() -> FlagParser:
    parser = FlagParser(
        "sglang serve",
        "Serve a model over HTTP, with OpenAI's API.",
        usage="sglang serve [--model-path MODEL] [--host ADDRESS] [--port N] [options]",
        epilog="Example: sglang serve --port 30000",
    )
    for name, section in SECTIONS.items():
        parser.add_flags(_TITLES[name], flags_of(section), owner=section.__name__)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML or JSON file with any of these settings; flags win over it.",
    )
    parser.add_flags("model and machine", server_flags(), owner="ServerArgs")
    return parser
