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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.utils.errors import (
    ModelNotFound,
    PipelineDefinitionError,
    UserError,
)
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

if TYPE_CHECKING:
    from sglang.multimodal_gen.configs.pipeline_configs.base import PipelineConfig
    from sglang.multimodal_gen.runtime.loader.model_source import ModelSource
    from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
        ComposedPipelineBase,
    )
    from sglang.multimodal_gen.runtime.pipelines_core.stage import PipelineStage

Detector = Callable[[str], bool]


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
class StageRow:
    """One stage of a pipeline, for ``sglang models explain``; None means undeclared."""

    name: str
    class_name: str
    role: str
    reads: tuple[str, ...] | None
    writes: tuple[str, ...] | None


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
            PipelineDefinitionError: a path is already registered, or a class is of a wrong kind.
        """
        _check_kind("sampling_param_cls", sampling_param_cls, SamplingParams)
        _check_kind("pipeline_config_cls", pipeline_config_cls, _pipeline_config_base())
        entry = _Configs(
            sampling_param_cls,
            pipeline_config_cls,
            tuple(hf_model_paths or ()),
            tuple(model_detectors or ()),
            self._family_pipelines,
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

        Raises:
            PipelineDefinitionError: a class is of a wrong kind, or a name or path is taken and
                ``overwrite`` is not set.
        """
        self._discover()
        _check_kind("pipeline_cls", pipeline_cls, _pipeline_base())
        _check_kind("sampling_param_cls", sampling_param_cls, SamplingParams)
        _check_kind("pipeline_config_cls", pipeline_config_cls, _pipeline_config_base())
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
            self._pipelines[name] = pipeline_cls
            # In front, so that an intended replacement is found before what it replaces.
            self._configs.insert(0 if overwrite else len(self._configs), entry)

    def _refuse_known_paths(self, paths: Iterable[str]) -> None:
        taken = {path.lower() for entry in self._configs for path in entry.paths}
        for path in paths:
            if path.lower() in taken:
                raise PipelineDefinitionError(f"Model path {path!r} is already registered")

    # Finding them.

    def get_model_info(self, source: ModelSource, backend: str = "auto") -> ModelInfo:
        """The classes that serve a model.

        In this order: the exact id, a hub snapshot folder of that id, a folder named like it, then
        detectors over the path and the ``_class_name``. With ``backend="auto"``, what no family
        matches is run by the Diffusers pipeline that it names; a family that matches is final.

        Raises:
            ModelNotFound: nothing matches, or two entries match equally well.
        """
        if backend == "diffusers":
            return _diffusers_info()
        self._discover()
        class_name = source.class_name
        entry = self._find_configs(source.name, class_name)
        name = _pipeline_of(entry, class_name)
        pipeline_cls = self._pipelines.get(name or "")
        if pipeline_cls is None or entry is None:
            missing = f"no native family serves _class_name={class_name!r}"
            if backend == "auto" and _diffusers_offers(class_name):
                return _diffusers_info(f"backend diffusers: {missing} of {source.name}")
            known = sorted(self._pipelines)
            hint = (
                "Diffusers has no pipeline of that name either"
                if backend == "auto"
                else "The Diffusers pipeline of that name runs with --backend diffusers"
            )
            raise ModelNotFound(
                f"model_path={source.name!r}: {missing}.{did_you_mean(class_name or '', known)} "
                f"Native pipelines: {', '.join(known)}. {hint}"
            )
        return ModelInfo(pipeline_cls, entry.sampling_param_cls, entry.pipeline_config_cls)

    def _find_configs(self, path: str, class_name: str | None) -> _Configs | None:
        wanted = path.rstrip("/").lower()
        tests: tuple[Callable[[_Configs], bool], ...] = (
            lambda e: any(p.lower() == wanted for p in e.paths),
            lambda e: any(f"models--{p.lower().replace('/', '--')}/" in wanted for p in e.paths),
            lambda e: any(_short(p.lower()) == _short(wanted) for p in e.paths),
            lambda e: any(detect((class_name or "").lower()) for detect in e.detectors),
            lambda e: any(detect(wanted) for detect in e.detectors),
        )
        for test in tests:
            found = [entry for entry in self._configs if test(entry)]
            if len(found) > 1 and not found[0].replaces:
                names = " and ".join(e.pipeline_config_cls.__name__ for e in found)
                raise ModelNotFound(
                    f"model_path={path!r} (_class_name={class_name!r}) fits {names}; use an exact "
                    "registered id"
                )
            if found:
                return found[0]
        return None

    def get_pipeline_class(self, name: str) -> type[ComposedPipelineBase]:
        """A registered pipeline class by its ``pipeline_name``.

        Raises:
            ModelNotFound: there is none; the nearest name is offered.
        """
        self._discover()
        if name not in self._pipelines:
            known = sorted(self._pipelines)
            raise ModelNotFound(
                f"no pipeline is called {name!r}.{did_you_mean(name, known)} "
                f"Known: {', '.join(known)}"
            )
        return self._pipelines[name]

    def known_models(self) -> list[KnownModel]:
        """Every registered family variant."""
        self._discover()
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
        for stem, module in _modules_of(self.pipeline_package):
            classes = _entry_classes(module)
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
    model_path: str, revision: str | None = None, backend: str = "auto"
) -> ModelInfo:
    """The classes that serve a model path, hub id or bundled name.

    Raises:
        ModelNotFound: the path leads nowhere, or no family serves what is there.
        CheckpointError: the folder is no usable checkpoint.
    """
    from sglang.multimodal_gen.runtime.loader.model_source import resolve_model_source

    return REGISTRY.get_model_info(resolve_model_source(model_path, revision), backend)


def explain(name: str) -> list[StageRow]:
    """The stages of a pipeline with what they read and write; nothing is loaded.

    ``name`` is a pipeline's name, or a model path.

    Raises:
        ModelNotFound: nothing is known by that name.
    """
    stages, roles = _unloaded_stages(name)
    return [
        StageRow(
            name=stage_name,
            class_name=type(stage).__name__,
            role=roles[stage_name].value,
            reads=None if stage.reads is None else tuple(sorted(stage.reads)),
            writes=None if stage.writes is None else tuple(sorted(stage.writes)),
        )
        for stage_name, stage in stages.items()
    ]


def _unloaded_stages(name: str) -> tuple[dict[str, PipelineStage], dict[str, Any]]:
    from sglang.multimodal_gen.runtime.server_args import ServerArgs

    pipeline_cls, config_cls = _classes_by_name(name)
    placeholders = {m: _Unloaded(m) for m in pipeline_cls._required_config_modules}
    args = ServerArgs.from_flat(device="cpu", pipeline_config=config_cls())
    pipeline = pipeline_cls(name, args, loaded_modules=placeholders)
    return pipeline.stages, pipeline.stage_roles


def _classes_by_name(name: str) -> tuple[type[ComposedPipelineBase], type[PipelineConfig]]:
    models = known_models()
    for known in models:
        if name in known.pipelines:
            return REGISTRY.get_pipeline_class(name), known.pipeline_config
        if name in known.paths:
            return REGISTRY.get_pipeline_class(known.pipelines[0]), known.pipeline_config
    try:
        info = get_model_info(name)
    except UserError as error:
        names = sorted({n for k in models for n in (*k.pipelines, *k.paths)})
        raise ModelNotFound(
            f"{name!r} is neither a known pipeline or model nor a checkpoint."
            f"{did_you_mean(name, names)} Known: {', '.join(names)}. ({error})"
        ) from None
    return info.pipeline_cls, info.pipeline_config_cls


@dataclass(frozen=True, slots=True)
class _Unloaded:
    """Stands for a component where a pipeline is only described."""

    name: str


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
