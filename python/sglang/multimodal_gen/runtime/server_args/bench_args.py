"""What the commands of ``sglang bench`` measure, and how they judge it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from sglang.multimodal_gen.runtime.server_args.flags import check_fields, flag
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchServeArgs:
    """One load test: which server, which requests, how fast they come."""

    url: str | None = flag(
        None, help="Server to ask, without /v1; by default one is started for the test."
    )
    mix: str | None = flag(
        None,
        help="YAML or JSON file with the kinds of request; by default what "
        "the model can do: pictures, edits, videos.",
    )
    request_rate: float | tuple[float, ...] = flag(
        1.0, help="Requests a second, arriving at random times; several rates run in turn."
    )
    num_requests: int = flag(50, help="Requests at each rate.")
    seed: int = flag(0, help="Decides when each request comes, and which it is.")
    variants: int = flag(2, help="Seeds with which each kind of request is asked.")
    request_timeout: float = flag(
        300.0, help="Seconds after which a request without an answer counts as lost."
    )
    check: bool = flag(
        True, help="Compare each picture with the one that the same request gets alone."
    )
    api_key: str | None = flag(None, help="Key for a server that wants one.")
    output: str | None = flag(None, help="File for the whole report, as JSON.")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.url is not None and not re.fullmatch(r"https?://[^\s?#]+", self.url):
            raise InvalidArgument("url", self.url, "must be an http(s) URL.")
        for rate in self.rates:
            if not 0 < rate <= 10_000:
                raise InvalidArgument("request_rate", rate, "must lie above 0, and at most 10000.")
        if not self.rates:
            raise InvalidArgument("request_rate", self.request_rate, "names no rate.")
        for name, low, high in (
            ("num_requests", 1, 1_000_000),
            ("variants", 1, 1000),
            ("request_timeout", 0.1, 86_400),
        ):
            if not low <= getattr(self, name) <= high:
                raise InvalidArgument(name, getattr(self, name), f"must lie in {low:g}..{high:g}.")

    @property
    def rates(self) -> tuple[float, ...]:
        """The rates as a tuple."""
        rate = self.request_rate
        return (float(rate),) if isinstance(rate, (int, float)) else tuple(map(float, rate))


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchTrialArgs:
    """What ``sglang bench step`` and ``bench request`` measure, and beside what."""

    prompt: str = flag("a lighthouse on a cliff", help="What to make.")
    rounds: int = flag(3, help="Requests of each side that are timed, turn by turn.")
    warm_up: int = flag(2, help="Requests of each side before, which are not.")
    reference: Literal["auto", "diffusers", "diffusers-compiled", "none"] = flag(
        "auto",
        help="What to compare with in the same run: the Diffusers library's own pipeline, as it is "
        "or with its repeated blocks compiled. 'auto' is the first, where it can run the model.",
    )
    random_weights: bool = flag(
        False, help="Make weights on the device, by the configs; no files of weights are read."
    )
    gpu: str | None = flag(
        None, help="Whose rates the floor takes; by default this machine's, where they are known."
    )
    profile: str | None = flag(
        None,
        help="Folder for a trace of one more request (trace.json) and a table of time by "
        "operation (operations.txt); waits of the host in the loop are counted.",
    )
    output: str | None = flag(None, help="File for everything measured, as JSON.")

    def __post_init__(self) -> None:
        check_fields(self)
        for name, low in (("rounds", 1), ("warm_up", 0)):
            if not low <= getattr(self, name) <= 1000:
                raise InvalidArgument(name, getattr(self, name), f"must lie in {low}..1000.")
