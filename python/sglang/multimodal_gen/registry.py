"""From a model path or name to the three classes that serve it.

Families make themselves known in two files of one name, both found by walking the package on the
first look-up, never at import: ``runtime/pipelines/{model}.py`` has an ``EntryClass``, and
``configs/pipeline_configs/{model}.py`` a ``register()`` that calls `register_configs`.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.configs.registration_checks import check_registration
from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.models.external_packages import load_external_packages
from sglang.multimodal_gen.runtime.server_args.sections import ModelArgs
from sglang.multimodal_gen.runtime.utils.errors import (
    InvalidArgument,
    ModelNotFound,
    PipelineDefinitionError,
)
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

if TYPE_CHECKING:
    from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
    from sglang.multimodal_gen.runtime.loader.model_source import Layout, ModelSource
    from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
        ComposedPipelineBase,
    )

Detector = Callable[[str], bool]
Test = Callable[["_Configs"], bool]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The three classes behind one model."""

    pipeline_cls: type[ComposedPipelineBase]
    sampling_param_cls: type[SamplingParams]
    pipeline_config_cls: type[PipelineConfig]
    backend: str = "sglang"
    """Who runs it: ``sglang`` (a native family) or ``diffusers``."""
    notes: tuple[str, ...] = ()
    """One sentence for each choice that was made for the caller."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One registered family variant, for listings."""

    pipelines: tuple[str, ...]
    paths: tuple[str, ...]
    sampling_params: type[SamplingParams]
    pipeline_config: type[PipelineConfig]
    task_types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Configs:
    sampling_param_cls: type[SamplingParams]
    pipeline_config_cls: type[PipelineConfig]
    paths: tuple[str, ...]
    detectors: tuple[Detector, ...]
    pipeline_names: tuple[
        str, ...
    ] = ()  # of the family; `_class_name` chooses where it has several
    replaces: bool = False  # wins over what else fits: registered with overwrite=True


@dataclass
class Registry:
    """What families have made known. The process has one, `REGISTRY`; ``register()`` fills it."""

    pipeline_package: str = "sglang.multimodal_gen.runtime.pipelines"
    config_package: str = "sglang.multimodal_gen.configs.pipeline_configs"
    _pipelines: dict[str, type[ComposedPipelineBase]] = field(default_factory=dict)
    _configs: list[_Configs] = field(default_factory=list)
    _discovered: bool = False
    _discovering: bool = False
    _family_pipelines: tuple[str, ...] = ()  # of the family whose register() is running
    _lock: threading.RLock = field(default_factory=threading.RLock)

    # Making families known.

    def register_configs(
        self,
        sampling_param_cls: type[SamplingParams],
        pipeline_config_cls: type[PipelineConfig],
        hf_model_paths: Sequence[str] | None = None,
        model_detectors: Sequence[Detector] | None = None,
    ) -> str:
        """Make a family variant known: which settings and hooks serve which model paths.

        ``hf_model_paths`` are exact ids; a detector gets, in lower case, a path or the
        ``_class_name`` of a ``model_index.json``.

        Returns:
            The new entry's id.

        Raises:
            PipelineDefinitionError: a path is already registered, a class is of a wrong kind, or
                tasks or detectors are declared wrongly.
        """
        _check_kind("sampling_param_cls", sampling_param_cls, SamplingParams)
        _check_kind("pipeline_config_cls", pipeline_config_cls, _pipeline_config_base())
        check_registration(pipeline_config_cls, hf_model_paths, model_detectors)
        own = pipeline_config_cls.pipeline_name
        entry = _Configs(
            sampling_param_cls,
            pipeline_config_cls,
            tuple(hf_model_paths or ()),
            tuple(model_detectors or ()),
            self._family_pipelines if own is None else (own,),
        )
        with self._lock:
            self._refuse_known_paths(entry.paths)
            self._configs.append(entry)
            return str(len(self._configs) - 1)

    def register_pipeline(
        self,
        pipeline_cls: type[ComposedPipelineBase],
        *,
        sampling_param_cls: type[SamplingParams],
        pipeline_config_cls: type[PipelineConfig],
        hf_model_paths: Sequence[str] | None = None,
        model_detectors: Sequence[Detector] | None = None,
        overwrite: bool = False,
    ) -> None:
        """Make a pipeline of an installed package known, with its settings and hooks.

        With ``overwrite``, a pipeline of the same name goes, and so do the settings that were its
        alone: its model paths and detectors lead to the new one.

        Raises:
            PipelineDefinitionError: a class is of a wrong kind, tasks or detectors are declared
                wrongly, or a name or path is taken and ``overwrite`` is not set.
        """
        self._discover()
        _check_kind("pipeline_cls", pipeline_cls, _pipeline_base())
        _check_kind("sampling_param_cls", sampling_param_cls, SamplingParams)
        _check_kind("pipeline_config_cls", pipeline_config_cls, _pipeline_config_base())
        check_registration(pipeline_config_cls, hf_model_paths, model_detectors)
        name = pipeline_cls.pipeline_name
        paths = tuple(hf_model_paths or ())
        entry = _Configs(
            sampling_param_cls,
            pipeline_config_cls,
            paths,
            tuple(model_detectors or ()),
            (name,),
            replaces=overwrite,
        )
        with self._lock:
            if not overwrite:
                if name in self._pipelines:
                    raise PipelineDefinitionError(
                        f"Pipeline {name!r} is already registered; pass overwrite=True to replace "
                        "it"
                    )
                self._refuse_known_paths(paths)
            entry = self._heir(entry) if overwrite else entry
            self._pipelines[name] = pipeline_cls
            # In front, so that an intended replacement is found before what it replaces.
            self._configs.insert(0 if overwrite else len(self._configs), entry)

    def _heir(self, new: _Configs) -> _Configs:
        """Take a pipeline's name from the entries that have it; what is left of them moves in."""
        (name,) = new.pipeline_names
        kept: list[_Configs] = []
        for old in self._configs:
            others = tuple(n for n in old.pipeline_names if n != name)
            if others == old.pipeline_names:
                kept.append(old)
                continue
            new = replace(
                new,
                paths=tuple(dict.fromkeys((*new.paths, *old.paths))),
                detectors=(*new.detectors, *(() if others else old.detectors)),
            )
            if others:
                kept.append(replace(old, pipeline_names=others))
        self._configs = kept
        return new

    def _refuse_known_paths(self, paths: Iterable[str]) -> None:
        taken = {path.lower() for entry in self._configs for path in entry.paths}
        for path in paths:
            if path.lower() in taken:
                raise PipelineDefinitionError(f"Model path {path!r} is already registered")

    # Finding them.

    def find(self, model: ModelArgs) -> tuple[ModelSource, ModelInfo]:
        """Where the model is that the arguments name, and the classes that serve it.

        A checkpoint without ``model_index.json`` is served if its pipeline is certain: by name, by
        ``model_id``, or because its path or id is a registered one.

        Raises:
            ModelNotFound: nothing is there, nothing serves it, or two entries match equally well.
            CheckpointError: the folder is no usable checkpoint.
            InvalidArgument: ``model_id`` is not registered, or the Diffusers backend is asked for
                and a native family too.
        """
        from sglang.multimodal_gen.runtime.loader.model_source import resolve_model_source

        self._ready()
        pipeline, model_id = model.pipeline_class_name, model.model_id
        _refuse_choice(model.backend, pipeline, model_id)  # before a download

        def layout() -> Layout | None:
            name = pipeline or self._pipeline_without_index(model.model_path, model_id)
            return None if name is None else self.get_pipeline_class(name).checkpoint_layout()

        if pipeline is not None:
            self.get_pipeline_class(pipeline)  # a misspelt name, before a download
            if model_id is not None and model.backend != "diffusers":
                self._serving_both(model_id, pipeline)
        ids = [path for entry in self._configs for path in entry.paths]
        source = resolve_model_source(model.model_path, model.revision, layout, ids)
        info = self.get_model_info(source, model.backend, pipeline=pipeline, model_id=model_id)
        return source, info

    def get_model_info(
        self,
        source: ModelSource,
        backend: str = "auto",
        *,
        pipeline: str | None = None,
        model_id: str | None = None,
    ) -> ModelInfo:
        """The classes that serve a model.

        In this order: the exact path or id, a hub snapshot folder of a registered id, a folder
        named like one, the ``_class_name``, then detectors over the ``_class_name`` and the path.
        ``pipeline`` names the pipeline instead; ``model_id`` is a registered id that is looked up
        instead of the path. With ``backend="auto"``, what no family matches is run by the Diffusers
        pipeline that it names; a family that matches is final.

        Raises:
            ModelNotFound: nothing matches, or two entries match equally well.
            InvalidArgument: ``model_id`` is not registered, or not with ``pipeline``; or the
                Diffusers backend is asked for and a native family too.
        """
        _refuse_choice(backend, pipeline, model_id)
        if backend == "diffusers":
            return _diffusers_info()
        self._ready()
        if model_id is not None and pipeline is not None:
            entry = self._serving_both(model_id, pipeline)
        elif model_id is not None:
            entry = self._by_id(model_id)
        elif pipeline is not None:
            entry = self._configs_of_pipeline(source, pipeline)
        else:
            entry = self._find_configs(source.name, source.class_name, self._configs)
        name = pipeline or _pipeline_of(entry, source.class_name)
        pipeline_cls = self._pipelines.get(name or "")
        if pipeline_cls is None or entry is None:
            chosen = model_id is not None
            if backend == "auto" and not chosen and _diffusers_offers(source.class_name):
                missing = f"no native family serves _class_name={source.class_name!r}"
                return _diffusers_info(f"backend diffusers: {missing} of {source.name}")
            if chosen and entry is not None:
                raise ModelNotFound(
                    f"model_id={model_id!r} is a family of several pipelines, and _class_name="
                    f"{source.class_name!r} of {source.name} is none of them; --pipeline NAME "
                    f"chooses one: {', '.join(entry.pipeline_names)}"
                )
            raise ModelNotFound(self._nothing_serves(source, backend))
        return ModelInfo(pipeline_cls, entry.sampling_param_cls, entry.pipeline_config_cls)

    def _find_configs(
        self, path: str, class_name: str | None, entries: Sequence[_Configs]
    ) -> _Configs | None:
        wanted, lowered = path.rstrip("/").lower(), (class_name or "").lower()

        def detected(entry: _Configs) -> bool:
            return any(detect(lowered) for detect in entry.detectors)

        def detected_by_path(entry: _Configs) -> bool:
            return any(detect(wanted) for detect in entry.detectors)

        # An id that several pipelines of one family share: the checkpoint says which it is.
        ids = [t for test in _id_tests(path) for t in (_serving(test, class_name), test)]
        by_id = _choose(entries, ids, path, class_name)
        if by_id is not None:
            return by_id
        named = [e for e in entries if class_name is not None and class_name in e.pipeline_names]
        if len(named) > 1 and not named[0].replaces:
            # Variants of one family: what they detect tells them apart.
            chosen = _choose(named, (detected, detected_by_path), path, class_name)
            named = named if chosen is None else [chosen]
        by_name = _choose(named, (lambda _: True,), path, class_name)
        return by_name or _choose(entries, (detected, detected_by_path), path, class_name)

    def _by_id(self, model_id: str) -> _Configs:
        exact, _, named = _id_tests(model_id)
        entry = _choose(self._configs, (exact, named), model_id, None)
        if entry is None:
            known = [path for e in self._configs for path in e.paths]
            raise InvalidArgument(
                "model_id",
                model_id,
                f"no such id is registered.{did_you_mean(model_id, known)} "
                f"Registered: {', '.join(known)}",
            )
        return entry

    def _serving_both(self, model_id: str, pipeline: str) -> _Configs:
        """The settings of an id, whose family has the pipeline that was asked for as well."""
        entry = self._by_id(model_id)
        if entry.pipeline_names and pipeline not in entry.pipeline_names:
            raise InvalidArgument(
                "model_id",
                model_id,
                f"is served by {' and '.join(entry.pipeline_names)}, and --pipeline {pipeline} "
                "asks for another; leave one of them out",
            )
        return entry

    def _pipeline_without_index(self, path: str, model_id: str | None) -> str | None:
        """The pipeline of a checkpoint that does not name one: by its id alone, never guessed."""
        if model_id is not None:
            entry: _Configs | None = self._by_id(model_id)
        else:
            entry = _choose(self._configs, _id_tests(path), path, None)
        return _pipeline_of(entry, None)

    def _configs_of_pipeline(self, source: ModelSource, pipeline: str) -> _Configs:
        """The settings registered with a pipeline that was asked for by name."""
        pipeline_cls = self.get_pipeline_class(pipeline)
        own = [e for e in self._configs if pipeline in e.pipeline_names]
        entry = self._find_configs(source.name, pipeline, own)
        if entry is None:
            raise ModelNotFound(
                f"pipeline {pipeline!r} ({pipeline_cls.__module__}) is known, but no settings were "
                "registered with it: use register_pipeline, or register_configs in its family's "
                "register()"
            )
        return entry

    def _nothing_serves(self, source: ModelSource, backend: str) -> str:
        known = sorted(self._pipelines)
        ids = {_short(path): path for entry in self._configs for path in entry.paths}
        near = did_you_mean(source.class_name or "", known)
        near = near or did_you_mean(_short(source.name.rstrip("/")), ids)
        return (
            f"model_path={source.name!r}: no native family serves "
            f"_class_name={source.class_name!r}.{near} Native pipelines: {', '.join(known)}. "
            "--pipeline NAME or --model-id ID chooses one for a checkpoint that does not say it. "
            + (
                "Diffusers has no pipeline of that name either."
                if backend == "auto"
                else "The Diffusers pipeline of that name runs with --backend diffusers."
            )
        )

    def get_pipeline_class(self, name: str) -> type[ComposedPipelineBase]:
        """A registered pipeline class by its ``pipeline_name``.

        Raises:
            ModelNotFound: there is none; the nearest name is offered.
        """
        self._ready()
        if name not in self._pipelines:
            known = sorted(self._pipelines)
            raise ModelNotFound(
                f"no pipeline is called {name!r}.{did_you_mean(name, known)} "
                f"Known: {', '.join(known)}"
            )
        return self._pipelines[name]

    def known_models(self) -> list[KnownModel]:
        """Every registered family variant."""
        self._ready()
        models = []
        for entry in self._configs:
            config = entry.pipeline_config_cls()
            models.append(
                KnownModel(
                    pipelines=entry.pipeline_names,
                    paths=entry.paths,
                    sampling_params=entry.sampling_param_cls,
                    pipeline_config=entry.pipeline_config_cls,
                    task_types=tuple(t.name for t in config.get_supported_task_types()),
                )
            )
        return models

    # Walking the package.

    def _ready(self) -> None:
        """Before a look-up: the families of this package, then those of external packages."""
        self._discover()
        load_external_packages()

    def _discover(self) -> None:
        """Walk the package once; a family that fails leaves nothing behind and fails again."""
        with self._lock:
            if self._discovered or self._discovering:
                return
            self._discovering = True
            before = dict(self._pipelines), list(self._configs)
            try:
                self._walk()
                self._discovered = True
            finally:
                self._discovering, self._family_pipelines = False, ()
                if not self._discovered:
                    self._pipelines, self._configs = before

    def _walk(self) -> None:
        families: dict[str, tuple[str, ...]] = {}
        homes: dict[str, str] = {}
        for stem, module in _modules_of(self.pipeline_package):
            classes = _entry_classes(module)
            for cls in classes:
                if cls.pipeline_name in homes:
                    raise PipelineDefinitionError(
                        f"pipeline_name {cls.pipeline_name!r} is in EntryClass of "
                        f"{homes[cls.pipeline_name]} and of {module.__name__}: give one of them "
                        "another"
                    )
                homes[cls.pipeline_name] = module.__name__
            self._pipelines |= {cls.pipeline_name: cls for cls in classes}
            families[stem] = tuple(cls.pipeline_name for cls in classes)
        for stem, module in _modules_of(self.config_package):
            if hasattr(module, "register"):
                self._family_pipelines = families.get(stem, ())
                module.register()


REGISTRY = Registry()
register_configs = REGISTRY.register_configs
register_pipeline = REGISTRY.register_pipeline
known_models = REGISTRY.known_models


def get_model_info(
    model_path: str,
    revision: str | None = None,
    backend: str = "auto",
    *,
    pipeline: str | None = None,
    model_id: str | None = None,
) -> ModelInfo:
    """The classes that serve a model path, hub id or bundled name; see `Registry.find`.

    Raises:
        ModelNotFound: the path leads nowhere, or no family serves what is there.
        CheckpointError: the folder is no usable checkpoint.
    """
    from sglang.multimodal_gen.runtime.server_args import ServerArgs

    args = ServerArgs.from_flat(
        model_path=model_path,
        revision=revision,
        backend=backend,
        pipeline_class_name=pipeline,
        model_id=model_id,
    )
    return REGISTRY.find(args.model)[1]


def _refuse_choice(backend: str, pipeline: str | None, model_id: str | None) -> None:
    """The Diffusers backend runs what the checkpoint names, and no choice of a native family."""
    if backend != "diffusers":
        return
    for name, value in (("pipeline_class_name", pipeline), ("model_id", model_id)):
        if value is not None:
            raise InvalidArgument(
                name,
                value,
                "chooses a native family, and --backend diffusers runs the pipeline that the "
                "checkpoint's model_index.json names. Leave one of the two out",
            )


def _diffusers_info(*notes: str) -> ModelInfo:
    # Imported here: the library costs seconds, and native families do not need its pipelines.
    from sglang.multimodal_gen.runtime.diffusers_backend.diffusers_pipeline import DiffusersPipeline
    from sglang.multimodal_gen.runtime.diffusers_backend.settings import (
        DiffusersPipelineConfig,
        DiffusersSamplingParams,
    )

    return ModelInfo(
        DiffusersPipeline, DiffusersSamplingParams, DiffusersPipelineConfig, "diffusers", notes
    )


def _diffusers_offers(class_name: str | None) -> bool:
    from sglang.multimodal_gen.runtime.diffusers_backend.call_signature import offers

    return offers(class_name)


def _short(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def _id_tests(path: str) -> tuple[Test, Test, Test]:
    """How surely a path is a registered id: it is, it is a hub snapshot of it, its name is."""
    wanted = path.rstrip("/").lower()
    return (
        lambda e: any(p.rstrip("/").lower() == wanted for p in e.paths),
        lambda e: any(f"models--{p.lower().replace('/', '--')}/" in wanted for p in e.paths),
        lambda e: any(_short(p.lower()) == _short(wanted) for p in e.paths),
    )


def _serving(test: Test, class_name: str | None) -> Test:
    """The same test, of entries alone whose family has a pipeline of that class."""
    return lambda e: class_name in e.pipeline_names and test(e)


def _label(entry: _Configs) -> str:
    """Variants may share their classes: their ids, else their pipelines, tell them apart."""
    told = ", ".join(entry.paths or entry.pipeline_names) or "no id"
    return f"{entry.pipeline_config_cls.__name__} ({told})"


def _choose(
    entries: Sequence[_Configs], tests: Iterable[Test], path: str, class_name: str | None
) -> _Configs | None:
    """The one entry that passes the first test that any passes."""
    for test in tests:
        found = [entry for entry in entries if test(entry)]
        if len(found) > 1 and not found[0].replaces:
            names = " and ".join(map(_label, found))
            raise ModelNotFound(
                f"model_path={path!r} (_class_name={class_name!r}) fits {names}; name an exact "
                "registered id with --model-id"
            )
        if found:
            return found[0]
    return None


def _pipeline_of(entry: _Configs | None, class_name: str | None) -> str | None:
    """The pipeline of a family that serves a checkpoint: its class's, or the family's only one."""
    if entry is None or class_name in entry.pipeline_names or len(entry.pipeline_names) != 1:
        return class_name
    return entry.pipeline_names[0]


def _modules_of(package_name: str) -> list[tuple[str, Any]]:
    """The modules of a package by name, imported, in alphabetical order."""
    package = importlib.import_module(package_name)
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    return [(name, importlib.import_module(f"{package_name}.{name}")) for name in names]


def _entry_classes(module: Any) -> list[Any]:
    entry = getattr(module, "EntryClass", [])
    return list(entry) if isinstance(entry, (list, tuple)) else [entry]


def _check_kind(field_name: str, value: object, base: type) -> None:
    if not (isinstance(value, type) and issubclass(value, base)):
        raise PipelineDefinitionError(f"{field_name} must inherit from {base.__name__}: {value!r}")


def _pipeline_base() -> type:
    from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
        ComposedPipelineBase,
    )

    return ComposedPipelineBase


def _pipeline_config_base() -> type:
    from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig

    return PipelineConfig
