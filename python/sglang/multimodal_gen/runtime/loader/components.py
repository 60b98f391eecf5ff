"""All components of a pipeline: who loads each, in which precision, in which order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.layers.quantization.fp8 import is_scale, quantizer_of
from sglang.multimodal_gen.runtime.loader.capabilities import lacking
from sglang.multimodal_gen.runtime.loader.component_loaders.component_loader import (
    ComponentLoader,
    ComponentSpec,
    LoadedComponent,
    NeuralComponentLoader,
    PlainStateDictComponentLoader,
)
from sglang.multimodal_gen.runtime.loader.component_loaders.image_processor_loader import (
    ImageProcessorLoader,
)
from sglang.multimodal_gen.runtime.loader.component_loaders.library_classes import (
    LIBRARIES,
    library_class,
)
from sglang.multimodal_gen.runtime.loader.component_loaders.picture_processor_loader import (
    PictureProcessorLoader,
)
from sglang.multimodal_gen.runtime.loader.component_loaders.scheduler_loader import (
    SchedulerLoader,
)
from sglang.multimodal_gen.runtime.loader.component_loaders.text_encoder_loader import (
    TextEncoderLoader,
)
from sglang.multimodal_gen.runtime.loader.component_loaders.tokenizer_loader import (
    TokenizerLoader,
)
from sglang.multimodal_gen.runtime.loader.json_file import read_json_object
from sglang.multimodal_gen.runtime.loader.model_index import class_in_folder
from sglang.multimodal_gen.runtime.loader.model_source import ModelSource
from sglang.multimodal_gen.runtime.loader.quantize import check_given, wish_of
from sglang.multimodal_gen.runtime.loader.residency import (
    component_facts,
    module_facts,
    plan_components,
    share_of,
)
from sglang.multimodal_gen.runtime.loader.weights import check_weights, dtype_rule
from sglang.multimodal_gen.runtime.memory.host_home import HostHome
from sglang.multimodal_gen.runtime.memory.offloaded_component import OffloadedComponent
from sglang.multimodal_gen.runtime.memory.plan import ComponentFacts, Residency, ResidencyPlan
from sglang.multimodal_gen.runtime.memory.weight_home import WeightHome
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
from sglang.multimodal_gen.runtime.platforms.copy_lane import CopyLane, copy_lane
from sglang.multimodal_gen.runtime.platforms.memory import MemoryFacts
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.utils.component_roles import is_denoiser, role_of
from sglang.multimodal_gen.runtime.utils.errors import (
    CheckpointError,
    InvalidArgument,
    PipelineDefinitionError,
)
from sglang.multimodal_gen.runtime.utils.progress import ProgressEvent, ProgressListener
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

LOADERS: Mapping[str, type[ComponentLoader]] = {
    "transformer": NeuralComponentLoader,
    "text_encoder": TextEncoderLoader,
    "image_encoder": TextEncoderLoader,
    "image_processor": ImageProcessorLoader,
    "vae": NeuralComponentLoader,
    "scheduler": SchedulerLoader,
    "tokenizer": TokenizerLoader,
    "processor": PictureProcessorLoader,
}
"""Role -> its default loader."""


def read_component_configs(
    source: ModelSource, names: Mapping[str, str], server_args: ServerArgs
) -> dict[str, dict[str, Any]]:
    """Component name -> its ``config.json``, for those that have one.

    ``names`` maps a pipeline's component names to those of ``model_index.json``.

    Raises:
        InvalidArgument: an argument names no folder, or a checkpoint of one file lacks others.
    """
    _check_one_file(source, names, server_args)
    configs = {}
    for name, key in names.items():
        path = _path(source, name, key, server_args) / "config.json"
        if path.is_file():
            configs[name] = read_json_object(path)
    return configs


def load_components(
    source: ModelSource,
    names: Mapping[str, str],
    server_args: ServerArgs,
    loaders: Mapping[str, type[ComponentLoader]],
    progress: ProgressListener | None = None,
    default_configs: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    parallel: ParallelState | None = None,
    plan: ResidencyPlan | None = None,
    lane: CopyLane | None = None,
) -> dict[str, LoadedComponent]:
    """Load components: those without weights first, then the largest first.

    So a fault that is cheap to find is found early, and memory runs out early if it does. Every
    component's folder and headers are looked at before the first is loaded. ``progress`` counts
    the bytes of all of them together; ``default_configs`` are for components without a
    ``config.json``; ``parallel`` says which slices of the weights this rank holds; ``plan`` (from
    `plan_memory`; all on the device by default) which of them rest in host memory, from where
    ``lane`` will copy them.

    Raises:
        CheckpointError: a component is missing, damaged or does not fit.
        InvalidArgument: a component argument names no component of this pipeline, or no folder.
        PipelineDefinitionError: a component has no loader.
    """
    if parallel is None:
        parallel = ParallelState.single(server_args.platform.device)
    chosen, specs = _found(source, names, server_args, loaders, default_configs or {}, parallel)
    if plan is not None:
        lane = copy_lane(parallel.device) if lane is None else lane
        homes = _homes(chosen, plan, server_args, parallel, lane)
        # A copy forgets the headers that its original has read: no more copies than needed.
        specs |= {name: replace(specs[name], home=home) for name, home in homes.items()}
    sizes = {
        name: spec.checkpoint.total_bytes if isinstance(chosen[name], NeuralComponentLoader) else 0
        for name, spec in specs.items()
    }
    total, before = sum(sizes.values()), 0
    loaded: dict[str, LoadedComponent] = {}
    for name in sorted(names, key=lambda n: (sizes[n] > 0, -sizes[n], n)):
        loaded[name] = chosen[name].load(specs[name], _shared(progress, before, total))
        before += sizes[name]
    return {name: loaded[name] for name in names}


def plan_memory(
    source: ModelSource | None,
    names: Mapping[str, str],
    server_args: ServerArgs,
    loaders: Mapping[str, type[ComponentLoader]],
    default_configs: Mapping[str, Mapping[str, Any]],
    given: Mapping[str, Any],
    *,
    parallel: ParallelState,
    memory: MemoryFacts,
) -> ResidencyPlan:
    """Where each component's weights will be, decided before any is read; raises as
    `load_components`. Components that are ``given`` ready stay as they are unless a flag names
    them; ``source`` may be None if there are no others.

    ``memory`` is what this node has free; its ranks share the host's part.

    Raises:
        InvalidArgument: a memory flag cannot be honoured.
        OutOfMemory: the components fit in no way.
    """
    check_given(given, [name for name in given if is_denoiser(name)], server_args)
    facts: list[ComponentFacts] = []
    if source is not None:
        facts = components_facts(
            source, names, server_args, loaders, default_configs, parallel=parallel
        )
    known = [
        module_facts(name, module)
        for name, module in given.items()
        if isinstance(module, nn.Module)
    ]
    known = _taking_turns(known, server_args)
    share = share_of(memory, server_args.parallel, parallel)
    return plan_components(facts, known, [*names, *given], server_args.memory, share, parallel)


def components_facts(
    source: ModelSource,
    names: Mapping[str, str],
    server_args: ServerArgs,
    loaders: Mapping[str, type[ComponentLoader]],
    default_configs: Mapping[str, Mapping[str, Any]],
    *,
    parallel: ParallelState,
) -> list[ComponentFacts]:
    """The sizes of all components that have weights, from headers; raises as `load_components`."""
    chosen, specs = _found(source, names, server_args, loaders, default_configs, parallel)
    facts = [
        component_facts(specs[name], loader, role_of(name, names[name]))
        for name, loader in chosen.items()
        if isinstance(loader, NeuralComponentLoader)
    ]
    return _taking_turns(facts, server_args)


def _taking_turns(facts: list[ComponentFacts], server_args: ServerArgs) -> list[ComponentFacts]:
    """The same, where two denoisers work one after the other."""
    config = server_args.pipeline_config
    if config is None or config.boundary_ratio is None:
        return facts
    return [replace(f, takes_turns=f.group == "dit") for f in facts]


def outline_components(
    source: ModelSource,
    names: Mapping[str, str],
    server_args: ServerArgs,
    loaders: Mapping[str, type[ComponentLoader]],
    default_configs: Mapping[str, Mapping[str, Any]],
    *,
    parallel: ParallelState,
    stored: bool = True,
    buffers: bool = False,
) -> dict[str, Any]:
    """Every component without its weights: modules are on the meta device, in their precision, and
    the others are ready; raises as `load_components`, stored names and shapes included.

    Without ``stored`` there need be no files of weights. With ``buffers`` those that constructors
    compute stay, on the CPU.
    """
    chosen, specs = _found(
        source, names, server_args, loaders, default_configs, parallel, stored=stored
    )
    outlined: dict[str, Any] = {}
    for name, loader in chosen.items():
        if not isinstance(loader, NeuralComponentLoader):
            outlined[name] = loader.load(specs[name]).module
            continue
        module, dtype = loader.module_on_meta(specs[name])
        if stored:
            checkpoint = specs[name].checkpoint
            check_weights(module, checkpoint, label=name, exact=loader.exact_keys)
        rule = dtype_rule(module, dtype)
        for path, parameter in module.named_parameters():
            fixed = is_scale(parameter) or quantizer_of(parameter) is not None
            if parameter.is_floating_point() and not fixed:
                parameter.data = parameter.data.to(rule(path))
        module = module if buffers else module.to("meta")
        outlined[name] = module.eval().requires_grad_(False)
    return outlined


def offload_given(
    given: Mapping[str, Any], plan: ResidencyPlan, server_args: ServerArgs, lane: CopyLane
) -> dict[str, OffloadedComponent]:
    """Move the weights of ready components that the plan offloads into host memory."""
    pin = server_args.memory.pin_cpu_memory
    return {
        name: HostHome(name, plan[name], lane, pin=pin).adopt(module)
        for name, module in given.items()
        if plan[name].mode is not Residency.RESIDENT
    }


def _found(
    source: ModelSource,
    names: Mapping[str, str],
    server_args: ServerArgs,
    loaders: Mapping[str, type[ComponentLoader]],
    default_configs: Mapping[str, Mapping[str, Any]],
    parallel: ParallelState,
    *,
    stored: bool = True,
) -> tuple[dict[str, ComponentLoader], dict[str, ComponentSpec]]:
    """Each component's loader and what is to be loaded; every folder and header was looked at."""
    _check_names(names, server_args)
    _check_one_file(source, names, server_args)
    chosen = {name: _loader(name, key, loaders) for name, key in names.items()}
    _check_weights(chosen, server_args)
    specs = {
        name: replace(
            _spec(
                source, name, key, server_args, chosen[name], default_configs.get(name), parallel
            ),
            stored=stored,
        )
        for name, key in names.items()
    }
    wish = server_args.model.quantization
    if wish is not None and not any(spec.quantization for spec in specs.values()):
        problem = f"no component that is loaded ({', '.join(names)}) is a denoiser"
        raise InvalidArgument("quantization", wish, f"{problem}; leave it out")
    for name, spec in specs.items():
        spec.require_folder()
        loader = chosen[name]
        if stored and isinstance(loader, NeuralComponentLoader):
            _ = spec.checkpoint
            _check_replacement(source, names[name], loader, spec, server_args)
    return chosen, specs


def _check_replacement(
    source: ModelSource,
    key: str,
    loader: NeuralComponentLoader,
    spec: ComponentSpec,
    server_args: ServerArgs,
) -> None:
    """A component from another folder must do what the index's class does for the stages."""
    replaced, indexed = server_args.model.component_paths.get(spec.name), source.components.get(key)
    if replaced is None or indexed is None:
        return
    actual = loader.model_class(spec)
    library, architecture = indexed
    if ModelRegistry.knows(architecture):
        usual = ModelRegistry.resolve_model_cls(architecture)[0]
    elif library in LIBRARIES:
        usual = library_class(spec.name, library, architecture)
    else:
        return
    missing = lacking(actual, usual)
    if missing:
        raise InvalidArgument(
            f"component_paths.{spec.name}",
            replaced,
            f"is a {actual.__name__}, which cannot stand for {usual.__name__}: it has no "
            f"{', '.join(missing)}",
        )


def _homes(
    loaders: Mapping[str, ComponentLoader],
    plan: ResidencyPlan,
    server_args: ServerArgs,
    parallel: ParallelState,
    lane: CopyLane,
) -> dict[str, WeightHome]:
    """Where weights go that do not simply go to the device."""
    homes: dict[str, WeightHome] = {}
    pin = server_args.memory.pin_cpu_memory
    for name, loader in loaders.items():
        if not isinstance(loader, NeuralComponentLoader):
            continue
        if name in plan.sharded:
            # Inside: importing torch's sharding takes a second that few runs should pay.
            from sglang.multimodal_gen.runtime.memory.sharded_home import ShardedHome

            homes[name] = ShardedHome(name, parallel.sp, parallel.device)
        elif plan[name].mode is not Residency.RESIDENT:
            homes[name] = HostHome(name, plan[name], lane, pin=pin)
    return homes


def _shared(progress: ProgressListener | None, before: int, total: int) -> ProgressListener | None:
    """One component's progress, counted as part of all components' bytes."""
    if progress is None:
        return None
    return lambda event: progress(ProgressEvent("load", before + event.done, total, event.label))


def _loader(name: str, key: str, loaders: Mapping[str, type[ComponentLoader]]) -> ComponentLoader:
    """The pipeline's choice for this very name, else the role's, else that of an alias's target."""
    cls = loaders.get(name) or LOADERS.get(role_of(name, key))
    if cls is None:
        raise PipelineDefinitionError(
            f"component {name!r} has no default loader.{did_you_mean(role_of(name), LOADERS)} "
            f"Roles with one: {', '.join(LOADERS)}; choose another in `component_loaders`"
        )
    return cls()


def _spec(
    source: ModelSource,
    name: str,
    key: str,
    server_args: ServerArgs,
    loader: ComponentLoader,
    default_config: Mapping[str, Any] | None,
    parallel: ParallelState,
) -> ComponentSpec:
    model = server_args.model
    path = _path(source, name, key, server_args)
    entry = source.components.get(key)
    if entry is None and source.indexed and name not in model.component_paths:
        raise CheckpointError(
            f"{source.root / 'model_index.json'} has no component {key!r}, which this pipeline "
            f"needs; it has {', '.join(source.components) or 'none'}"
        )
    needs_config = key in source.weights_files and default_config is None
    if needs_config and not (path / "config.json").is_file():
        raise InvalidArgument(
            "model_path",
            source.name,
            f"is weights alone; a folder with the config.json of {name} must say which model they "
            f"are for: --component-paths.{name} FOLDER",
        )
    library, architecture = component_class(source, name, key, server_args)
    return ComponentSpec(
        name=name,
        path=path,
        library=library,
        architecture=architecture,
        precision=_precision(name, key, loader, server_args),
        device=str(parallel.device),
        parallel=parallel,
        weights=_weights(source, name, key, server_args),
        default_config=default_config,
        is_denoiser=is_denoiser(name, key),
        quantization=wish_of(server_args) if is_denoiser(name, key) else None,
    )


def component_class(
    source: ModelSource, name: str, key: str, server_args: ServerArgs
) -> tuple[str, str] | tuple[None, None]:
    """A component's library and class: what the index says, of a replaced one what its folder says.

    Transformers' folders name the whole model that they were saved from. Where the index's class
    is of that model, or of a part of it (``CLIPTextModel`` of ``CLIPModel``), it stays: it says
    which part the pipeline uses.
    """
    path, indexed = _path(source, name, key, server_args), source.components.get(key)
    if name not in server_args.model.component_paths and indexed is not None:
        return indexed
    library, architecture = class_in_folder(path)
    if library is None or architecture is None:
        return indexed or (None, None)
    if indexed is not None and library == "transformers" and _is_part(name, indexed, path):
        return indexed
    return library, architecture


def _is_part(name: str, indexed: tuple[str, str], folder: Path) -> bool:
    """Whether a class of Transformers can be made from a folder's configuration."""
    library, architecture = indexed
    if ModelRegistry.knows(architecture):
        cls: Any = ModelRegistry.resolve_model_cls(architecture)[0]
    elif library == "transformers":
        cls = library_class(name, library, architecture)
    else:
        return False
    config_class = getattr(cls, "config_class", None)
    if config_class is None or not (folder / "config.json").is_file():
        return False
    whole = read_json_object(folder / "config.json")
    part = whole.get(config_class.base_config_key)
    configs = [whole, part] if isinstance(part, dict) else [whole]
    return any(config.get("model_type") == config_class.model_type for config in configs)


def _path(source: ModelSource, name: str, key: str, server_args: ServerArgs) -> Path:
    """The component's folder; for the one whose weights are a file, the folder of that file."""
    replaced = server_args.model.component_paths.get(name)
    if replaced is None:
        return source.root if key in source.weights_files else source.root / key
    path = Path(replaced).expanduser()
    if not path.is_dir():
        raise InvalidArgument(f"component_paths.{name}", replaced, "no such folder")
    return path


def _weights(source: ModelSource, name: str, key: str, server_args: ServerArgs) -> Path | None:
    """Where the weights are, if not in the component's folder; what the user names wins."""
    given = server_args.model.component_weights_paths.get(name)
    if given is None:
        return source.weights_files.get(key)
    path = Path(given).expanduser()
    if not path.exists():
        raise InvalidArgument(f"component_weights_paths.{name}", given, "no such file or folder")
    return path


def _precision(name: str, key: str, loader: ComponentLoader, server_args: ServerArgs) -> str:
    """What was said for this component, else for all, else what the family's config says."""
    model, config = server_args.model, server_args.pipeline_config
    if name in model.component_precisions:
        return model.component_precisions[name]
    if model.precision not in ("config", "auto") or config is None:
        return "fp32" if model.precision in ("config", "auto") else model.precision
    if isinstance(loader, PlainStateDictComponentLoader):
        return config.dit_precision  # auxiliary modules work beside the denoiser
    role = role_of(name, key)
    if role == "vae":
        return config.vae_precision
    if role == "image_encoder":
        return config.image_encoder_precision
    if role == "text_encoder":
        label = name if role_of(name) == role else key
        suffix = label.removeprefix("text_encoder").removeprefix("_")
        index = int(suffix) - 1 if suffix else 0
        precisions = config.text_encoder_precisions
        return precisions[min(index, len(precisions) - 1)]
    return config.dit_precision


def _check_one_file(source: ModelSource, names: Mapping[str, str], server_args: ServerArgs) -> None:
    """A checkpoint of one file is one component: the user says where the others are."""
    if not source.weights_files:
        return
    given = server_args.model.component_paths
    missing = [n for n, key in names.items() if n not in given and key not in source.weights_files]
    if missing:
        raise InvalidArgument(
            "model_path",
            source.name,
            f"is one file, the weights of {' and '.join(source.weights_files)}; the pipeline also "
            f"needs {', '.join(missing)}. Give each a folder: "
            + " ".join(f"--component-paths.{name} FOLDER" for name in missing),
        )


def _check_weights(chosen: Mapping[str, ComponentLoader], server_args: ServerArgs) -> None:
    for name, value in server_args.model.component_weights_paths.items():
        if not isinstance(chosen[name], NeuralComponentLoader):
            raise InvalidArgument(
                f"component_weights_paths.{name}",
                value,
                f"{type(chosen[name]).__name__} reads no weights; leave it out, or replace the "
                f"whole component with --component-paths.{name}",
            )


def _check_names(names: Mapping[str, str], server_args: ServerArgs) -> None:
    model = server_args.model
    for field in ("component_paths", "component_weights_paths", "component_precisions"):
        for name, value in getattr(model, field).items():
            if name not in names:
                raise InvalidArgument(
                    f"{field}.{name}",
                    value,
                    f"this pipeline has no such component.{did_you_mean(name, names)} "
                    f"It has: {', '.join(names)}",
                )
    for name, value in model.component_precisions.items():
        if role_of(name) in ("scheduler", "tokenizer", "image_processor", "processor"):
            raise InvalidArgument(
                f"component_precisions.{name}", value, "this component has no weights; leave it out"
            )
