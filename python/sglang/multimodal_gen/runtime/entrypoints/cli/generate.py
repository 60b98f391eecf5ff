"""``sglang generate``: load a model, make pictures or videos, write them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.configs.task_type import DataType
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
from sglang.multimodal_gen.runtime.entrypoints.cli.streams import give_up_output
from sglang.multimodal_gen.runtime.utils.environ import launched_rank
from sglang.multimodal_gen.runtime.utils.errors import OutputError
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
    logging.basicConfig(stream=sys.stderr)
    logging.getLogger("sglang").setLevel(options.server.observe.log_level.upper())
    run = _Run(options)
    try:
        run.generate()
    finally:
        run.tell()
    return 0


def open_generator(
    args: ServerArgs,
    request: Mapping[str, Any],
    on_admitted: Callable[[int, DataType, int | None], None],
    progress: ProgressListener | None,
) -> DiffGenerator:
    """Load the model, unless its checkpoint's configs already tell that it cannot do ``request``.

    ``on_admitted`` hears how many outputs there will be before weights load, of what kind, and at
    what rate videos will play; what it raises saves the loading. torch is imported here, after
    everything that needs no torch was checked.
    """
    from sglang.multimodal_gen.runtime.entrypoints.diffusion_generator import DiffGenerator
    from sglang.multimodal_gen.runtime.managers.ranks.follower import is_front

    def admit(model: ModelDescription) -> None:
        params = model.sampling_params(request)
        batches = model.admit(params)
        model.check_adapter_names(params)
        if is_front(args.parallel, launched_rank()):
            count = sum(batch.batch_size for batch in batches)
            on_admitted(count, batches[0].data_type, batches[0].fps)

    return DiffGenerator.from_server_args(args, before_loading=admit, progress=progress)


class _Run:
    """One run of the command: outputs are on disk before anything is said about them."""

    def __init__(self, options: GenerateOptions) -> None:
        self.options = options
        self.place: Destination | None = None
        self.paths: list[Path] = []
        self.parts: list[GenerationResult] = []

    def generate(self) -> None:
        """Make the outputs, and write each batch as soon as it is there."""
        from sglang.multimodal_gen.runtime.entrypoints.input_pictures import InputPictures

        options = self.options
        with InputPictures() as pictures, TerminalProgress() as bars:
            # Admission before loading looks at files too: what is a URL becomes one first.
            request = pictures.named(options.request)
            listener = None if options.own.quiet else bars
            with open_generator(options.server, request, self._admitted, listener) as generator:
                if not options.own.quiet:
                    print_notes(generator.notes, sys.stderr)
                for part in generator.generate_batches(progress=listener, **request):
                    self._write(part)

    def tell(self) -> None:
        """Print what was made: also what was complete when something failed."""
        if not self.parts:
            return
        from sglang.multimodal_gen.runtime.entrypoints.diffusion_generator import merge_results

        result = merge_results(self.parts)
        print_warnings(result.warnings, sys.stderr)
        if not self.options.own.quiet:
            print_times(result, sys.stderr)
        if self.options.own.json:
            lines = [json_line(result, self.paths)]
        else:
            lines = [str(path) for path in self.paths]
        try:
            for line in lines:
                print(line)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            give_up_output()
            raise OutputError(
                f"the files are written, but not their paths: standard output refused them "
                f"({error.strerror})"
            ) from error

    def _admitted(self, count: int, makes: DataType, fps: int | None) -> None:
        self.place = destination(self.options.own, count, makes, fps)

    def _write(self, part: GenerationResult) -> None:
        assert self.place is not None, "a model was loaded without admission"
        written = self.place.write(
            part.outputs,
            model=part.model,
            parameters=part.parameters,
            metadata=self.options.own.save_metadata,
            first=len(self.paths),
        )
        self.parts.append(part)
        self.paths += written
