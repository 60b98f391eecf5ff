"""What ``sglang generate`` was asked to do: flags and config file, checked, as one record.

Flags come from three records: the server arguments, the sampling params of the model's family, and
`GenerateArgs`. A family is known only when the model path is, so the command line is read twice:
first with the params that every family shares, then with the family's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.multimodal_gen.configs.sample.sampling_params import (
    ImageSamplingParams,
    SamplingParams,
    VideoSamplingParams,
)
from sglang.multimodal_gen.runtime.entrypoints.cli.config_file import ConfigFile
from sglang.multimodal_gen.runtime.entrypoints.cli.prompts import read_prompts
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.flags import Flag, check_fields, flag, flags_of
from sglang.multimodal_gen.runtime.server_args.parser import FlagParser
from sglang.multimodal_gen.runtime.server_args.sections import ModelArgs
from sglang.multimodal_gen.runtime.server_args.server_args import server_flags
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError, UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateArgs:
    """What the command itself takes: where prompts come from and where outputs go."""

    prompt: str | tuple[str, ...] | None = flag(
        None, help="What to make. Several texts make several pictures."
    )
    prompt_file: str | None = flag(
        None,
        aliases=("--prompt-path",),
        help="File with one prompt a line; blank lines and lines that begin with # are skipped.",
    )
    output_path: str = flag(
        "outputs/",
        help="Folder for the outputs, or a file name for a single one: .png, .jpg, .webp for a "
        "picture, .mp4, .gif, .webp for a video.",
    )
    output_file_name: str | None = flag(
        None, help="Name of the file in the output folder; by default its time and seed."
    )
    overwrite: bool = flag(
        False, help="Replace a file of the chosen name; otherwise -2, -3, ... is added."
    )
    frames: bool = flag(
        False, help="Write each video as a new folder of PNG files, which lose nothing."
    )
    save_metadata: bool = flag(True, help="Store prompt, seed, model and settings in the file.")
    json: bool = flag(False, help="Print the result as one line of JSON on standard output.")
    quiet: bool = flag(False, help="Print no progress, notes or times; warnings stay.")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Everything ``sglang generate`` needs; nothing is loaded yet.

    ``sampling`` holds what was asked for, without prompts and without defaults: those are the
    checkpoint's and the family's.
    """

    server: ServerArgs
    own: GenerateArgs
    prompts: tuple[str, ...]
    sampling: dict[str, Any]

    @property
    def request(self) -> dict[str, Any]:
        """The sampling settings asked for, with the prompts."""
        return self.sampling | ({"prompt": list(self.prompts)} if self.prompts else {})


def read_options(argv: Sequence[str]) -> GenerateOptions | None:
    """The options of a command line; None when ``--help`` was asked for, and printed.

    Raises:
        UserError: an unknown flag or setting, a refused value, no prompt, or no such model.
    """
    first = _CommandLine(ImageSamplingParams, argv, unknown_allowed=True)
    if "help" in first.said:
        _print_help(first)
        return None
    sampling_cls = sampling_params_class(first.server_args().model)
    return _CommandLine(sampling_cls, argv, unknown_allowed=False).options()


def sampling_params_class(model: ModelArgs) -> type[SamplingParams]:
    """The sampling params of a model's family; the registry, and torch with it, is imported now.

    Raises:
        ModelNotFound, CheckpointError, InvalidArgument: see `registry.Registry.find`.
    """
    from sglang.multimodal_gen.registry import REGISTRY

    return REGISTRY.find(model)[1].sampling_param_cls


class _CommandLine:
    """A command line and its config file, read with one class of sampling params."""

    def __init__(
        self, sampling_cls: type[SamplingParams], argv: Sequence[str], *, unknown_allowed: bool
    ) -> None:
        self.sampling_cls = sampling_cls
        self.own_flags = flags_of(GenerateArgs)
        # `prompt` is the command's: it also comes from files.
        self.sampling_flags = flags_of(sampling_cls, without=("prompt",))
        self.parser = self._parser()
        if unknown_allowed:
            self.said, _ = self.parser.parse_known(argv)
        else:
            self.said = self.parser.parse(argv)
        self.config = _config_file(self.said)
        if self.config is not None and not unknown_allowed:
            self.config.check_keys((*server_flags(), *self.own_flags, *self.sampling_flags))

    def server_args(self) -> ServerArgs:
        """The server arguments of both sources."""
        return ServerArgs.from_flat(**self._values_of(server_flags()))

    def options(self) -> GenerateOptions:
        """Everything, checked as far as it can be without the model."""
        server = self.server_args()
        own = self._values_of(self.own_flags)
        sampling = self._values_of(self.sampling_flags)
        prompts = read_prompts(
            self.parser.values_of(self.said, self.own_flags),
            {} if self.config is None else self.config.values_of(self.own_flags),
            optional=self.sampling_cls.prompt_optional,
        )
        # Settings that no checkpoint could make valid are refused before one is loaded.
        settings = {**sampling, "prompt": prompts} if prompts else sampling
        self.sampling_cls.from_values(settings)
        return GenerateOptions(
            server=server,
            own=GenerateArgs(**own),
            prompts=tuple(prompts),
            sampling=sampling,
        )

    def _values_of(self, flags: Sequence[Flag]) -> dict[str, Any]:
        """The values of some flags: the command line over the config file."""
        values = {} if self.config is None else self.config.values_of(flags)
        for name, value in self.parser.values_of(self.said, flags).items():
            before = values.get(name)
            if isinstance(before, dict) and isinstance(value, dict):
                value = before | value  # each entry of a mapping is a setting of its own
            values[name] = value
        return values

    def _parser(self) -> FlagParser:
        parser = FlagParser(
            "sglang generate",
            "Make pictures from prompts.",
            usage="sglang generate --prompt TEXT [TEXT ...] [options]",
            epilog="With --model-path, --help also lists the flags of that model's family.\n"
            'Example: sglang generate --prompt "a red circle on a white background" --seed 7',
        )
        parser.add_flags("what to make, and where to", self.own_flags, owner="sglang generate")
        parser.add_argument(
            "--config",
            metavar="FILE",
            help="YAML or JSON file with any of these settings; flags win over it.",
        )
        name = self.sampling_cls.__name__
        parser.add_flags(f"how to make it ({name})", self.sampling_flags, owner=name)
        parser.add_flags("model and machine", server_flags(), owner="ServerArgs")
        if not issubclass(self.sampling_cls, VideoSamplingParams):
            problem = "is for models that make videos, and this one makes pictures. Leave it out."
            parser.add_absent(flags_of(VideoSamplingParams), problem)
        return parser


def _config_file(said: argparse.Namespace) -> ConfigFile | None:
    path = vars(said).get("config")
    return None if path is None else ConfigFile(Path(path))


def _print_help(first: _CommandLine) -> None:
    """The flags, with those of a family where the command line names its model."""
    path = vars(first.said).get("model_path")
    parser = first.parser
    if path is not None:
        try:
            family = sampling_params_class(first.server_args().model)
        except (UserError, CheckpointError) as error:
            parser.epilog = f"The flags of {path!r} are not listed: {error}"
        else:
            parser = _CommandLine(family, [], unknown_allowed=False).parser
    parser.print_help()
