"""Packages installed beside this one that register models and pipelines when they are imported.

Two doors: the environment variable ``SGLANG_EXTERNAL_MODEL_PACKAGE`` names packages, and an
installed distribution may declare entry points in the group ``sglang_diffusion.models``, each a
module, or a function that is called without arguments. Both registries open them before they answer
a look-up, once in each process; registering opens nothing.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from types import ModuleType

from sglang.multimodal_gen.runtime.utils.environ import EXTERNAL_MODEL_PACKAGE
from sglang.multimodal_gen.runtime.utils.errors import (
    CheckpointError,
    PipelineDefinitionError,
    UserError,
)

ENTRY_POINT_GROUP = "sglang_diffusion.models"


class ExternalPackages:
    """The external packages of one process; `load` opens each door once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._opened = False
        self._failure: Exception | None = None

    def load(self) -> None:
        """Import what the environment names, then load the entry points; later calls do nothing.

        A package that fails stops every look-up: its registrations are half done, so that it is
        not imported again, and its own error is raised each time.

        Raises:
            Exception: whatever the package raises, unchanged, with a note on who named it.
            PipelineDefinitionError: the package raised an error that is told without a traceback
                (that one is the cause) or called ``sys.exit``, or an entry point is neither module
                nor function.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._opened:
                return
            self._opened = True  # now: a package may look something up while it is imported
            try:
                for origin, opening in _doors():
                    with _named(origin):
                        opening()
            except Exception as error:
                self._failure = error
                raise


def _doors() -> Iterator[tuple[str, Callable[[], object]]]:
    """What is to be opened, with the words for who asked for it."""
    for name in EXTERNAL_MODEL_PACKAGE.read():
        yield f"{EXTERNAL_MODEL_PACKAGE.name} names {name!r}", partial(_import, name)
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        owner = point.dist.name if point.dist is not None else "an unknown distribution"
        origin = f"entry point {point.name!r} = {point.value!r} of {owner} ({ENTRY_POINT_GROUP})"
        yield origin, partial(_load, point)


def _import(name: str) -> None:
    if not all(part.isidentifier() for part in name.split(".")):
        raise PipelineDefinitionError(
            f"{name!r} is no name of a package as Python imports it (my_package, not a path and "
            "not the my-package that pip installs)"
        )
    importlib.import_module(name)


def _load(point: metadata.EntryPoint) -> None:
    found = point.load()
    if isinstance(found, ModuleType):
        return
    if isinstance(found, type) or not callable(found):
        raise PipelineDefinitionError(
            f"{found!r} is neither a module, which registers when it is imported, nor a function "
            "that registers when it is called"
        )
    found()


@contextmanager
def _named(origin: str) -> Iterator[None]:
    """Say in an error's notes which setting led to it."""
    try:
        yield
    except (UserError, CheckpointError) as error:
        # Those are told to a user in one paragraph; a broken package needs its traceback.
        raise PipelineDefinitionError(f"{origin}: {error}") from error
    except SystemExit as error:  # no Exception: it would end the program without a word
        raise PipelineDefinitionError(
            f"{origin}: it ended the program while it was imported (sys.exit({error.code!r})); a "
            "package must only register"
        ) from error
    except Exception as error:
        error.add_note(f"while loading external models: {origin}")
        raise


EXTERNAL_PACKAGES = ExternalPackages()
load_external_packages = EXTERNAL_PACKAGES.load
