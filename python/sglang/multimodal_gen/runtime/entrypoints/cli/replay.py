"""``sglang replay``: make a file again from the settings in it, and say whether it is identical."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.parser import FlagParser
from sglang.multimodal_gen.runtime.server_args.server_args import server_flags
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest, ModelNotFound, UserError

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.entrypoints.diffusion_generator import DiffGenerator
    from sglang.multimodal_gen.runtime.entrypoints.replay import Comparison, Recipe

_HOW_IT_RUNS = {"quantization", "attention_backend", "enable_torch_compile"}
_EXIT_DIFFERENT = 1


def run(argv: Sequence[str]) -> int:
    """Run the command: 0 if the file is made again as it is, 1 if something differs."""
    parser = _parser()
    said = vars(parser.parse(argv))
    if "help" in said:
        parser.print_help()
        return 0
    if said.get("file") is None:
        parser.error("which file? A picture or video that this program made.")
    tolerance = _tolerance(said.get("tolerance", "0"))
    values = parser.values_of(argparse.Namespace(**said), server_flags())
    comparison = _replay(said, values)
    print(f"{said['file']}: {comparison.summary()}")
    if comparison.largest > tolerance and not values.keys() & _HOW_IT_RUNS:
        print(
            "note: a file does not say how the model ran; if it was made with --quantization, "
            "--attention-backend or --enable-torch-compile, replay it with the same",
            file=sys.stderr,
        )
    return 0 if comparison.largest <= tolerance else _EXIT_DIFFERENT


def _parser() -> FlagParser:
    parser = FlagParser(
        "sglang replay",
        "Make a picture again from the settings in it, and compare.",
        usage="sglang replay FILE [--model-path MODEL] [options]",
        epilog="Exit code 0 if every pixel is equal, 1 if not, 2 if it cannot be made again. A "
        "picture that was made in a batch, or on another machine, may differ by a little.",
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="PNG, JPEG, WebP or MP4.")
    parser.add_argument(
        "--output", metavar="FILE", help="Write the picture that was made now there, as PNG."
    )
    parser.add_argument(
        "--image-path", nargs="+", metavar="FILE", help="The pictures that it was made from."
    )
    parser.add_argument(
        "--tolerance", metavar="N", help="Difference, of 255, up to which the exit code is 0 (0)."
    )
    parser.add_argument(
        "--other-model", action="store_true",
        help="Allow a --model-path of another name than the file's.",
    )  # fmt: skip
    parser.add_flags("model and machine", server_flags(), owner="ServerArgs")
    return parser


def _tolerance(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 255:
        raise UserError(f"--tolerance {text}: must be a whole number in 0..255")
    return int(text)


def _replay(said: dict[str, Any], values: dict[str, Any]) -> Comparison:
    # Slow to import; who named a wrong flag should not have to wait for it.
    from sglang.multimodal_gen.runtime.entrypoints import replay

    file = Path(said["file"]).expanduser()
    recipe = replay.Recipe.read(file, said.get("image_path", ()))
    with _opened(recipe, said, values) as generator:
        made = _made_again(generator, recipe)
    if said.get("output"):
        from sglang.multimodal_gen.runtime.entrypoints.result_files import local_path
        from sglang.multimodal_gen.runtime.utils.atomic_file import write_new_file
        from sglang.multimodal_gen.runtime.utils.image_file import encode_image

        first = made if made.ndim == 3 else made[0]
        write_new_file(local_path(said["output"]), encode_image(first))
    if replay.is_video(file):
        return replay.compare_frames(file, made)
    return replay.compare(file, made)


def _made_again(generator: DiffGenerator, recipe: Recipe) -> Any:
    """The pixels, with refusals in the words of the file."""
    try:
        result = generator.generate(**recipe.settings)
    except InvalidRequest as error:
        if error.field == "lora" and recipe.adapters:
            raise UserError(
                f"{recipe.file} was made with the adapter(s) {', '.join(recipe.adapters)}, and not "
                f"all of them are here: {error.problem}. Load them with --lora-path PATH "
                "--lora-nickname NAME"
            ) from error
        raise UserError(
            f"{recipe.file}: its settings do not suit this model: {error}. Was it made by another "
            "model or version?"
        ) from error
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return result[0].array


def _opened(recipe: Recipe, said: dict[str, Any], values: dict[str, Any]) -> DiffGenerator:
    """The model that the file names, or the one given in its place."""
    given = values.get("model_path")
    if given is None:
        values = values | {"model_path": recipe.model}
    elif _is_other(given, recipe.model) and not said.get("other_model"):
        raise UserError(
            f"{recipe.file} was made by the model {recipe.model!r}, and --model-path gives "
            f"{given!r}; add --other-model to compare them anyway"
        )
    from sglang.multimodal_gen.runtime.entrypoints.diffusion_generator import DiffGenerator

    try:
        return DiffGenerator.from_server_args(ServerArgs.from_flat(**values))
    except ModelNotFound as error:
        if given is not None:
            raise
        raise UserError(
            f"{recipe.file} was made by the model {recipe.model!r}, which is not found under that "
            f"name; say where it is with --model-path. ({error})"
        ) from error


def _is_other(given: str, recorded: str) -> bool:
    """Whether another model than the recorded one is given. A name that leads nowhere by itself is
    what a server called it: then the given place is believed."""
    from sglang.multimodal_gen.runtime.loader.model_source import bundled_models, is_hub_id

    if _short(given) == _short(recorded):
        return False
    return (
        recorded in bundled_models() or is_hub_id(recorded) or Path(recorded).expanduser().exists()
    )


def _short(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]
