"""``sglang generate``: load a model, make pictures, write them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.runtime.entrypoints.cli.generate_options import (
    GenerateOptions,
    read_options,
)
from sglang.multimodal_gen.runtime.entrypoints.cli.output_files import destination
from sglang.multimodal_gen.runtime.entrypoints.cli.report import (
    json_line,
    print_notes,
    print_times,
    print_warnings,
)
from sglang.multimodal_gen.runtime.utils.terminal_progress import TerminalProgress

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.entrypoints.diffusion_generator import (
        DiffGenerator,
        GenerationResult,
    )
    from sglang.multimodal_gen.runtime.entrypoints.result_files import Destination
    from sglang.multimodal_gen.runtime.managers.model_description import ModelDescription
    from sglang.multimodal_gen.runtime.server_args import ServerArgs
    from sglang.multimodal_gen.runtime.utils.progress import ProgressListener


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Standard output carries the result alone, paths or JSON; all else goes to standard error.
    """
    options = read_options(argv)
    if options is None:
        return 0
    place = destination(options.own, options.image_count)
    logging.basicConfig(stream=sys.stderr)
    logging.getLogger("sglang").setLevel(options.server.observe.log_level.upper())
    result = _generate(options)
    _tell(options, result, place)
    return 0


def open_generator(
    args: ServerArgs, request: Mapping[str, Any], progress: ProgressListener | None
) -> DiffGenerator:
    """Load the model, unless its checkpoint's configs already tell that it cannot do ``request``.

    torch is imported here, after everything that needs no torch was checked.
    """
    from sglang.multimodal_gen.runtime.entrypoints.diffusion_generator import DiffGenerator

    def refuse_early(model: ModelDescription) -> None:
        params = model.sampling_params(request)
        model.admit(params)
        model.check_adapter_names(params)

    return DiffGenerator.from_server_args(args, before_loading=refuse_early, progress=progress)


def _generate(options: GenerateOptions) -> GenerationResult:
    with TerminalProgress() as bars:
        listener = None if options.own.quiet else bars
        with open_generator(options.server, options.request, listener) as generator:
            if not options.own.quiet:
                print_notes(generator.notes, sys.stderr)
            return generator.generate(progress=listener, **options.request)


def _tell(options: GenerateOptions, result: GenerationResult, place: Destination) -> None:
    """Write the pictures and print what was asked for."""
    paths = []
    written = place.write(
        result.images,
        model=result.model,
        parameters=result.parameters,
        metadata=options.own.save_metadata,
    )
    for path in written:
        paths.append(path)
        if not options.own.json:
            print(path, flush=True)
    if options.own.json:
        print(json_line(result, paths), flush=True)
    print_warnings(result.warnings, sys.stderr)
    if not options.own.quiet:
        print_times(result, sys.stderr)
