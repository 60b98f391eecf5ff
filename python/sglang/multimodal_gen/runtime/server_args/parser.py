"""An argument parser over :mod:`flags` whose faults are errors to show, not exits.

It differs from ``argparse`` in what users of this command rely on: ``_`` and ``-`` are the same in
a flag's name, ``--flag true`` works beside ``--flag``, names are never abbreviated, an unknown flag
is answered with the nearest known one, and a bad value raises ``InvalidArgument``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import MISSING
from typing import Any, NoReturn

from sglang.multimodal_gen.runtime.server_args.flags import Flag
from sglang.multimodal_gen.runtime.utils.errors import (
    InvalidArgument,
    PipelineDefinitionError,
    UserError,
)
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

# A whole flag token; a value that merely begins with dashes ("--a sentence") is left alone.
_TOKEN = re.compile(r"(?P<name>--[A-Za-z][\w-]*)(?:\.(?P<key>[\w.-]+))?(?P<rest>=.*)?", re.DOTALL)
_MISSING_VALUE = re.compile(r"argument (?P<flag>\S+): expected (one|at least one) argument")


class FlagParser(argparse.ArgumentParser):
    """A parser for the flags of one command.

    Nothing has a default here: the namespace holds what was said, so that a config file or a
    checkpoint can fill the rest. Values stay text until :meth:`values_of` asks a flag for them.
    """

    def __init__(
        self, prog: str, description: str, *, usage: str | None = None, epilog: str | None = None
    ) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            add_help=False,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._mappings: dict[str, Flag] = {}
        self._switches: set[str] = set()
        self._known: dict[str, str] = {}
        self._absent: dict[str, str] = {}
        self.add_switch("--help", "Show this text and exit.", short="-h")

    def add_switch(self, spelling: str, help: str, *, short: str | None = None) -> None:
        """Add a flag without a value that belongs to the command itself."""
        self._known[spelling] = self.prog
        names = (short, spelling) if short else (spelling,)
        self.add_argument(*names, action="store_true", help=help)

    def add_flags(self, title: str, flags: Iterable[Flag], *, owner: str) -> None:
        """Add a group of generated flags; ``owner`` is named when two groups claim one spelling."""
        group = self.add_argument_group(title)
        for spec in flags:
            for spelling in (spec.spelling, *spec.aliases):
                if spelling in self._known:
                    raise PipelineDefinitionError(
                        f"{owner}.{spec.name} claims the flag {spelling}, which "
                        f"{self._known[spelling]} has. Give the field metadata="
                        "{'flag': '--another-name'}, or False for no flag."
                    )
                self._known[spelling] = owner
            self._add_flag(group, spec)

    def add_absent(self, flags: Iterable[Flag], problem: str) -> None:
        """Tell why ``flags`` that are known elsewhere are not here; they stay unknown."""
        for spec in flags:
            for spelling in (spec.spelling, *spec.aliases):
                self._absent.setdefault(spelling, problem)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """What ``argv`` says; raises UserError for an unknown flag or a value out of place."""
        said, unknown = self.parse_known(argv)
        if unknown:
            raise UserError(self._unknown_message(unknown))
        return said

    def parse_known(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """What ``argv`` says in known flags, and the tokens that no flag explains."""
        return super().parse_known_args(self._normalised(list(argv)))

    def values_of(self, said: argparse.Namespace, flags: Iterable[Flag]) -> dict[str, Any]:
        """The parsed values of ``flags`` that were said, by field name."""
        texts = vars(said)
        values: dict[str, Any] = {}
        for spec in flags:
            if spec.key in texts:
                text = texts[spec.key]
                values[spec.name] = text if isinstance(text, bool) else spec.parse(text)
        return values

    def error(self, message: str) -> NoReturn:
        """Raise a UserError where argparse would print usage and exit."""
        missing = _MISSING_VALUE.fullmatch(message)
        if missing:
            flag = missing["flag"]
            hint = f"write {flag}=VALUE for a value that begins with '-'"
            raise UserError(f"{flag} needs a value; {hint}.")
        raise UserError(message)

    def _add_flag(self, group: Any, spec: Flag) -> None:
        options: dict[str, Any] = {"dest": spec.key, "help": _help_text(spec)}
        if spec.value.arity == "mapping":
            self._mappings[spec.spelling] = spec
            options |= {"action": _SetKey, "metavar": spec.value.metavar()}
            group.add_argument(f"{spec.spelling}.NAME", **options)
            return
        if spec.value.arity != "one":
            options |= {"action": "extend", "nargs": "+", "metavar": spec.value.metavar()}
        elif spec.value.item is bool:
            self._switches |= {spec.spelling, *spec.aliases}
            options |= {"action": argparse.BooleanOptionalAction}
        else:
            options |= {"metavar": spec.value.metavar()}
        group.add_argument(spec.spelling, *spec.aliases, **options)

    def _normalised(self, argv: list[str]) -> list[str]:
        """``argv`` with known flags in their own spelling and ``--switch true`` made a switch."""
        out: list[str] = []
        while argv:
            token = argv.pop(0)
            if token == "--":
                return [*out, token, *argv]
            match = _TOKEN.fullmatch(token)
            name = match["name"].replace("_", "-") if match else ""
            if match is None:
                out.append(token)
            elif match["rest"] == "=--":
                # argparse before Python 3.13 drops a lone "--" even where it is a value.
                raise UserError(f"{name} does not take '--' as its value.")
            elif name in self._mappings and match["key"]:
                out.append(self._keyed(name, match["key"]) + (match["rest"] or ""))
            elif name in self._switches and not match["key"]:
                out.append(_switch(name, match["rest"], argv))
            elif name in self._option_string_actions and not match["key"]:
                out.append(name + (match["rest"] or ""))
            else:
                out.append(token)
        return out

    def _keyed(self, name: str, key: str) -> str:
        """Make ``--component-paths.vae`` a flag of its own, so that errors name it in full."""
        spelling = f"{name}.{key}"
        if spelling not in self._option_string_actions:
            dest = self._mappings[name].key
            self.add_argument(spelling, action=_SetKey, dest=dest, help=argparse.SUPPRESS)
        return spelling

    def _unknown_message(self, tokens: list[str]) -> str:
        flags = [token for token in tokens if token.startswith("-")]
        if not flags:
            words = " ".join(map(repr, tokens))
            return f"unexpected {words}: every value follows a flag. Quote a text with spaces."
        typed = flags[0].partition("=")[0]
        name = typed.replace("_", "-")
        if name in self._mappings:
            return f"{name} needs a name: write {name}.NAME VALUE, such as {name}.vae VALUE."
        if name in self._absent and name not in self._known:
            return f"{typed}: {self._absent[name]}"
        known = [spelling for spelling in self._option_string_actions if "." not in spelling]
        hint = did_you_mean(name, [*known, *self._mappings])
        return f"unrecognized argument {typed}.{hint} '{self.prog} --help' lists all."


class _SetKey(argparse.Action):
    """Collects ``--name.KEY VALUE`` into a dict."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert option_string is not None
        key = option_string.partition(".")[2]
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), key: values})


def _switch(name: str, rest: str | None, following: list[str]) -> str:
    """The switch that ``--name``, ``--name=false`` or ``--name false`` means."""
    if rest is not None:
        said = rest[1:].lower()
        if said not in ("true", "false"):
            raise InvalidArgument(name, rest[1:], "must be true or false")
    elif following and following[0].lower() in ("true", "false"):
        said = following.pop(0).lower()
    else:
        return name
    return name if said == "true" else "--no-" + name.removeprefix("--")


def _help_text(spec: Flag) -> str:
    """The help sentence with its default, escaped for argparse."""
    default = spec.default
    if isinstance(default, bool):
        shown = "on" if default else "off"
    elif default in (None, MISSING, "") or (
        isinstance(default, list | tuple | dict) and not default
    ):
        return spec.help.replace("%", "%%")
    else:
        shown = ", ".join(spec.value.render(default))
    if len(shown) > 60:
        return spec.help.replace("%", "%%")
    return f"{spec.help} (default: {shown})".strip().replace("%", "%%")
