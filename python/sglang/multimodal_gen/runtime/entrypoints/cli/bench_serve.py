"""``sglang bench serve``: load on a server, open loop, with every picture judged."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang.multimodal_gen import __version__
from sglang.multimodal_gen.runtime.entrypoints.bench.answers import Outcome
from sglang.multimodal_gen.runtime.entrypoints.bench.load import (
    connected,
    made_alone,
    run_load,
    until_idle,
)
from sglang.multimodal_gen.runtime.entrypoints.bench.mix import (
    MixEntry,
    mix_for,
    plan,
    read_mix,
)
from sglang.multimodal_gen.runtime.entrypoints.bench.own_server import own_server
from sglang.multimodal_gen.runtime.entrypoints.bench.report import failed, summary, table_of
from sglang.multimodal_gen.runtime.entrypoints.cli.report_file import report_file, write_report
from sglang.multimodal_gen.runtime.server_args.bench_args import BenchServeArgs
from sglang.multimodal_gen.runtime.server_args.flags import flags_of
from sglang.multimodal_gen.runtime.server_args.parser import FlagParser
from sglang.multimodal_gen.runtime.utils.errors import UserError

_EPILOG = """\
What follows '--' goes to the server that is started:
  sglang bench serve --request-rate 1 2 4 -- --model-path demo --max-queued-requests 16
A server that runs already:
  sglang bench serve --url http://127.0.0.1:30000 --mix mix.yaml --output load.json"""


def run(argv: Sequence[str]) -> int:
    """Run the command; 1 where a request was lost, wrong, or made the server fail."""
    words, server_flags = _split(argv)
    parser = FlagParser(
        "sglang bench serve",
        "Load on a server: random arrivals, mixed requests, every picture judged.",
        usage="sglang bench serve [--url URL] [options] [-- options of sglang serve]",
        epilog=_EPILOG,
    )
    specs = flags_of(BenchServeArgs)
    parser.add_flags("load", specs, owner="BenchServeArgs")
    said = parser.parse(words)
    if "help" in said:
        parser.print_help()
        return 0
    args = BenchServeArgs(**parser.values_of(said, specs))  # type: ignore[arg-type]
    if args.url is not None and server_flags:
        raise UserError("--url names a server that runs; options after '--' would start another.")
    mix = None if args.mix is None else read_mix(args.mix)
    output = report_file(args.output)
    console = Console(stderr=True)
    with _server(args, server_flags, console) as url:
        report = asyncio.run(measure(url, args, mix, console))
    Console().print(table_of(report["rates"]))
    write_report(output, report)
    return int(failed(report["rates"]))


async def measure(
    url: str, args: BenchServeArgs, mix: Sequence[MixEntry] | None, console: Console
) -> dict[str, Any]:
    """All rates against one server; the report. Without a mix, the model's tasks decide it.

    Raises:
        UserError: the server is not there, or refuses a request of the mix.
    """
    summaries = []
    async with connected(url, args.api_key) as http:
        server = await _about(http)
        mix = mix_for(await _tasks(http)) if mix is None else mix
        with _progress(console) as progress:
            alone = {}
            if args.check:
                task = progress.add_task("alone", total=None)
                alone = await made_alone(
                    http, mix, args.variants, args.request_timeout,
                    lambda done, total: progress.update(task, completed=done, total=total),
                )  # fmt: skip
            for rate in args.rates:
                arrivals = plan(
                    mix, rate=rate, count=args.num_requests, seed=args.seed, variants=args.variants
                )
                task = progress.add_task(f"{rate:g} a second", total=len(arrivals))

                def tell(outcome: Outcome, task: Any = task) -> None:
                    progress.advance(task)

                load = await run_load(http, arrivals, alone, args.request_timeout, tell)
                summaries.append(summary(load, rate))
                await until_idle(http, args.request_timeout)
    return {
        "version": __version__,
        "url": url,
        "server": server,
        "seed": args.seed,
        "variants": args.variants,
        "mix": [
            {"name": e.name, "asks": e.asks, "weight": e.weight, "body": dict(e.body)} for e in mix
        ],
        "rates": summaries,
    }


@contextlib.contextmanager
def _server(args: BenchServeArgs, flags: Sequence[str], console: Console) -> Iterator[str]:
    if args.url is not None:
        yield args.url
        return
    with own_server(flags, tell=lambda sentence: console.print(sentence)) as server:
        yield server.url


async def _about(http: httpx.AsyncClient) -> dict[str, Any]:
    """What the server says of itself."""
    try:
        response = await http.get("/server_info")
        response.raise_for_status()
        return response.json()
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        raise UserError(
            f"{http.base_url}/server_info answers {status}; is it the server?"
        ) from error
    except (httpx.HTTPError, ValueError) as error:
        raise UserError(f"no server answers at {http.base_url} ({type(error).__name__})") from error


async def _tasks(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    """What the served model can do."""
    try:
        response = await http.get("/v1/models")
        response.raise_for_status()
        return response.json()["data"][0]["tasks"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{http.base_url}/v1/models does not say what the model does; name a --mix"
        ) from error


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not sys.stderr.isatty(),
    )


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(argv)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]
