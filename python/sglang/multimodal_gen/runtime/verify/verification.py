"""One verification: load both sides, run the checks in order, stop at the first divergence."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from sglang.multimodal_gen.runtime.layers.tensor_parallel import plan_of
from sglang.multimodal_gen.runtime.loader.hub import fetch_from_hub
from sglang.multimodal_gen.runtime.loader.model_source import is_hub_id
from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.component_roles import DENOISER
from sglang.multimodal_gen.runtime.utils.errors import (
    CheckpointError,
    DiffusionError,
    InvalidArgument,
    UserError,
)
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean
from sglang.multimodal_gen.runtime.verify.baseline import Baseline
from sglang.multimodal_gen.runtime.verify.evidence import Cause, Evidence, Finding, reason_of
from sglang.multimodal_gen.runtime.verify.mechanisms import MECHANISMS, Mechanism
from sglang.multimodal_gen.runtime.verify.on_ranks import CannotRun, Ranks, Refused
from sglang.multimodal_gen.runtime.verify.port import Port, decoder_name, denoiser_names, kind_of
from sglang.multimodal_gen.runtime.verify.reference import (
    DIFFUSERS,
    NONE,
    Reference,
    check_reference,
    load_reference,
)
from sglang.multimodal_gen.runtime.verify.reference_checks import (
    REFERENCE_CHECKS,
    ReferenceCheck,
    likely_cause,
)
from sglang.multimodal_gen.runtime.verify.request import Request, base_request
from sglang.multimodal_gen.runtime.verify.sensitivity import Sensitivity, measure_sensitivity
from sglang.multimodal_gen.runtime.verify.tiny_checkpoint import write_tiny_checkpoint

Verdict = Literal["ok", "FAILED", "proves nothing", "not supported here", "not compared", "not run"]
Weights = Literal["tiny", "real"]
Say = Callable[[str], None]

SENSITIVITY = "sensitivity"
"""The row that tells whether the reference, and not whether the port, is worth a comparison."""
PLAIN_RUN = "plain-run"
"""The row of a port that fails by itself, where no reference was run beside it."""
FAILING: frozenset[Verdict] = frozenset({"FAILED", "proves nothing"})


@dataclass(frozen=True)
class Row:
    """One check's outcome; ``error`` is None where nothing was measured."""

    name: str
    title: str
    verdict: Verdict
    error: float | None = None
    bound: float | None = None
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Verification:
    """What was asked, what came out, and why it parts where it does."""

    model: str
    pipeline: str
    reference: str
    weights: str
    sizes: tuple[tuple[int, int], ...]
    rows: tuple[Row, ...]
    cause: Cause | None

    @property
    def failed(self) -> str | None:
        """The name of the check that failed, if one did."""
        return next((row.name for row in self.rows if row.verdict in FAILING), None)

    @property
    def passed(self) -> bool:
        """Whether nothing failed, and something of the port was checked."""
        checked = [row for row in self.rows if row.name != SENSITIVITY]
        return self.failed is None and any(row.verdict == "ok" for row in checked)


@dataclass(frozen=True)
class Wish:
    """What the caller wants verified."""

    reference: str = DIFFUSERS
    checks: tuple[str, ...] = ()
    """Names of checks; empty for all."""
    sizes: tuple[tuple[int, int], ...] = ()
    """Heights and widths in pixels; empty for a square and a wide one."""
    weights: Weights = "tiny"
    seed: int = 5

    def __post_init__(self) -> None:
        known = check_names()
        for name in self.checks:
            if name not in known:
                problem = f"there is no such check.{did_you_mean(name, known)} "
                raise InvalidArgument("--checks", name, problem + f"Known: {', '.join(known)}")

    def wants(self, name: str) -> bool:
        """Whether a check is asked for."""
        return not self.checks or name in self.checks


def check_names() -> list[str]:
    """All checks by name, in running order."""
    return [check.name for check in (*REFERENCE_CHECKS, *MECHANISMS)]


def verify(server_args: ServerArgs, wish: Wish, say: Say) -> Verification:
    """Verify the model that the arguments name; ``say`` hears what is being done.

    Raises:
        UserError: no such model or reference, or the reference fails by itself.
        CheckpointError: a checkpoint cannot be loaded.
    """
    name = server_args.model.model_path
    if wish.weights == "tiny":
        server_args = _with_configs_here(server_args, say)
    model = ModelDescription.find(server_args)
    if model.info.backend != "sglang":
        raise UserError(
            f"model_path={model.source.name!r}: no native family serves it, so there is no port to "
            "verify; Diffusers runs it itself"
        )
    named = NONE if wish.reference == NONE else check_reference(wish.reference, model.source)
    with _weights_of(model, wish, say) as (loaded, weights), _threads_for(wish.weights):
        run = _Run(loaded, wish, say)
        run.against_reference()
        run.against_itself()
    return Verification(
        model=name,
        pipeline=model.info.pipeline_cls.__name__,
        reference=named,
        weights=weights,
        sizes=run.sizes,
        rows=tuple(run.rows),
        cause=run.cause,
    )


def _with_configs_here(server_args: ServerArgs, say: Say) -> ServerArgs:
    """A hub id's configs and tokenizers fetched, and no weights: tiny ones are made from these."""
    model = server_args.model
    if not is_hub_id(model.model_path):
        return server_args
    say(f"fetching the configs of {model.model_path}")
    root = fetch_from_hub(model.model_path, model.revision, weights=False)
    local = dataclasses.replace(model, model_path=str(root), revision=None)
    return dataclasses.replace(server_args, model=local)


@contextmanager
def _weights_of(
    model: ModelDescription, wish: Wish, say: Say
) -> Iterator[tuple[ModelDescription, str]]:
    """The model on the weights asked for, and what to call them."""
    if wish.weights == "real":
        yield model, "real"
        return
    with (
        tempfile.TemporaryDirectory(prefix="sglang-verify-") as folder,
        _told_of(model.source.root, folder),
    ):
        say("writing a tiny checkpoint from the configs")
        pipeline = model.info.pipeline_cls
        own = pipeline.component_loaders
        loaders = {key: own[n] for n, key in pipeline._index_names().items() if n in own}
        tiny = write_tiny_checkpoint(model.source, Path(folder), loaders=loaders)
        words = f"tiny, random, {tiny.parameters / 1e6:.1f} M parameters"
        if tiny.divisor > 1:
            words += f", widths / {tiny.divisor}"
        source = dataclasses.replace(model.source, root=tiny.root)
        family = dataclasses.replace(
            model.server_args, pipeline_config=model.info.pipeline_config_cls()
        )
        args = model.info.pipeline_cls.bind_checkpoint(source, family)
        yield dataclasses.replace(model, source=source, server_args=args), words


@contextmanager
def _told_of(checkpoint: Path, copy: str) -> Iterator[None]:
    """What is wrong with the copy is wrong with the checkpoint, whose files a user can mend."""
    try:
        yield
    except (CheckpointError, UserError) as error:
        if copy not in str(error):
            raise
        raise CheckpointError(str(error).replace(copy, str(checkpoint))) from error


@contextmanager
def _threads_for(weights: Weights) -> Iterator[None]:
    """One thread for tiny matrices: on busy cores, several mostly wait for each other (the bundled
    model took 2.4 s with one, and 45 to 76 s with two beside other work)."""
    threads = torch.get_num_threads()
    if weights == "tiny":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class _Run:
    """The state of one verification: rows so far, and whether they go on."""

    model: ModelDescription
    wish: Wish
    say: Say
    rows: list[Row] = field(default_factory=list)
    cause: Cause | None = None

    def __post_init__(self) -> None:
        self.say("loading the port")
        self.port = Port(self.model)
        self.requests = self._requests()
        self.sizes = tuple((r.values["height"], r.values["width"]) for r in self.requests)

    @property
    def parted(self) -> bool:
        """Whether a check failed: what comes after it is not run."""
        return any(row.verdict in FAILING for row in self.rows)

    def against_reference(self) -> None:
        """The checks that compare with the reference, if there is one."""
        wanted = [check for check in REFERENCE_CHECKS if self.wish.wants(check.name)]
        if not wanted:
            return
        if self.wish.reference == NONE:
            self.rows += [
                Row(c.name, c.title, "not compared", detail="no reference was asked for")
                for c in wanted
            ]
            return
        reference = self._load_reference()
        evidence = self._evidence(reference)
        for check in wanted:
            self._reference_row(check, evidence)

    def against_itself(self) -> None:
        """The mechanisms, against the plain run; ranks that were started for them are ended."""
        modules = self.port.pipeline.modules
        planned = (DENOISER, "text_encoder", "image_encoder")
        planless = any(
            plan_of(type(module)) is None
            for name, module in modules.items()
            if kind_of(name, type(self.port.pipeline)) in planned
        )
        ranks = Ranks(self.model, self.say, tuple(map(type, modules.values())), planless)
        try:
            self._mechanism_rows(ranks)
        finally:
            ranks.close()

    def _mechanism_rows(self, ranks: Ranks) -> None:
        wanted = [m for m in MECHANISMS if self.wish.wants(m.name)]
        baseline: Baseline | None = None
        for mechanism in wanted:
            if self.parted:
                self.rows.append(Row(mechanism.name, mechanism.title, "not run"))
                continue
            why = mechanism.unsupported(self.port)
            if why is not None:
                row = Row(mechanism.name, mechanism.title, "not supported here", detail=why)
                self.rows.append(row)
                continue
            if baseline is None:
                start = time.perf_counter()
                record = self.port.run(self.requests[0])
                if record.error is not None:
                    failure = Finding(float("inf"), reason_of(record.error))
                    spent = time.perf_counter() - start
                    self._add(PLAIN_RUN, "the port runs plainly", 0.0, failure, spent)
                    self.rows.append(Row(mechanism.name, mechanism.title, "not run"))
                    continue
                baseline = Baseline(self.requests[0], record, ranks)
            self._mechanism_row(mechanism, baseline)

    def _requests(self) -> list[Request]:
        config = self.port.config
        multiple = config.size_multiple
        sizes = self.wish.sizes or ((4 * multiple, 4 * multiple), (4 * multiple, 6 * multiple))
        tokens = self.model.sampling_params({}).max_sequence_length
        image = config.task_type.accepts_image_input
        frames = 2 * config.frame_multiple + 1 if config.makes_videos else None
        return [
            base_request(s, self.wish.seed, tokens, with_image=image, frames=frames) for s in sizes
        ]

    def _load_reference(self) -> Reference:
        self.say("loading the reference")
        cls = type(self.port.pipeline)
        keys = cls._extra_config_module_map
        denoisers = [keys.get(name, name) for name in denoiser_names(self.port.pipeline)]
        decoder = decoder_name(cls)
        assert decoder is not None, "the port has one"
        decoder = keys.get(decoder, decoder)
        reference = load_reference(
            self.wish.reference, self.model.source, self.model.server_args, denoisers, decoder
        )
        self.requests = [reference.fitting(request) for request in self.requests]
        return reference

    def _evidence(self, reference: Reference) -> list[Evidence]:
        """Both sides' records of each size; the first row says whether they mean anything."""
        records = []
        for request, size in zip(self.requests, self.sizes, strict=True):
            self.say(f"reference: {size[0]}x{size[1]}")
            records.append(reference.run(request))
        start = time.perf_counter()
        sensitivity = measure_sensitivity(
            reference, self.requests[0], records[0], self.port.config, self.say
        )
        self.rows.append(_sensitivity_row(sensitivity, time.perf_counter() - start))
        evidence = []
        for request, size, record in zip(self.requests, self.sizes, records, strict=True):
            if self.parted:
                break
            self.say(f"port: {size[0]}x{size[1]}")
            record.order = records[0].order
            evidence.append(Evidence(record, self.port.run(request), reference, self.port))
        return evidence

    def _reference_row(self, check: ReferenceCheck, evidence: Sequence[Evidence]) -> None:
        if self.parted:
            self.rows.append(Row(check.name, check.title, "not run"))
            return
        start = time.perf_counter()
        findings = [check.measure(one) for one in evidence]
        worst = max(range(len(findings)), key=lambda index: findings[index].error)
        finding = findings[worst]
        detail = finding.detail
        if finding.error > check.bound:
            self.say(f"{check.name} parts; testing likely causes")
            self.cause = likely_cause(check, evidence[worst], finding)
            detail = f"{self.sizes[worst][0]}x{self.sizes[worst][1]}: {detail}".rstrip(": ")
        self._add(check.name, check.title, check.bound, dataclasses.replace(
            finding, detail=detail), time.perf_counter() - start)  # fmt: skip

    def _mechanism_row(self, mechanism: Mechanism, baseline: Baseline) -> None:
        self.say(mechanism.title)
        start = time.perf_counter()
        try:
            finding = mechanism.run(self.port, baseline)
        except CannotRun as error:
            finding = Finding(0.0, skipped=without_flags(str(error)))
        except Refused as error:
            finding = Finding(0.0, unsupported=without_flags(str(error)))
        except DiffusionError as error:
            finding = Finding(float("inf"), reason_of(error))
        seconds = time.perf_counter() - start
        self._add(mechanism.name, mechanism.title, mechanism.bound, finding, seconds)

    def _add(self, name: str, title: str, bound: float, finding: Finding, seconds: float) -> None:
        if finding.skipped is not None:
            degenerate = finding.skipped.startswith("proves nothing")
            verdict: Verdict = "proves nothing" if degenerate else "not compared"
            self.rows.append(Row(name, title, verdict, detail=finding.skipped, seconds=seconds))
            return
        if finding.unsupported is not None:
            detail = finding.unsupported
            self.rows.append(Row(name, title, "not supported here", detail=detail, seconds=seconds))
            return
        bound = bound if finding.bound is None else finding.bound
        verdict = "ok" if finding.error <= bound else "FAILED"
        row = Row(name, title, verdict, finding.error, bound, finding.detail, seconds)
        self.rows.append(row)


def without_flags(message: str) -> str:
    """A refusal without its advice to use a flag: that is a server's, and not of this command."""
    return re.sub(r"[;.] (use|choose another) --\S.*", "", message, flags=re.IGNORECASE)


def _sensitivity_row(found: Sensitivity, seconds: float) -> Row:
    title = "the reference heeds the request"
    if not found.finite:
        detail = (
            "the reference's own picture holds NaN or infinity: its weights are damaged, or this "
            "request overflows; --weights tiny checks the port without them"
        )
        return Row(SENSITIVITY, title, "proves nothing", detail=detail, seconds=seconds)
    if found.idle:
        detail = (
            f"{' and '.join(found.idle)} does not move the reference's picture; try another "
            f"--seed, or --weights real ({found})"
        )
        return Row(SENSITIVITY, title, "proves nothing", detail=detail, seconds=seconds)
    if found.claimed_idle:
        detail = (
            f"{' and '.join(found.claimed_idle)} moves the reference, and the port's config says "
            "that it has no effect (should_use_guidance, guidance_embeds)"
        )
        return Row(SENSITIVITY, title, "FAILED", detail=detail, seconds=seconds)
    return Row(SENSITIVITY, title, "ok", detail=str(found), seconds=seconds)
