"""How one component of a checkpoint becomes an object: the base of all loaders."""

from __future__ import annotations

import inspect
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from sglang.multimodal_gen.runtime.distributed.parallel_state import ParallelState
from sglang.multimodal_gen.runtime.layers.products import pack_linears
from sglang.multimodal_gen.runtime.layers.tensor_parallel import PlannedModel, plan_of
from sglang.multimodal_gen.runtime.loader.checkpoint import Checkpoint, find_checkpoint
from sglang.multimodal_gen.runtime.loader.component_loaders.library_classes import library_class
from sglang.multimodal_gen.runtime.loader.json_file import read_json_object
from sglang.multimodal_gen.runtime.loader.meta_build import build_on_meta, default_dtype
from sglang.multimodal_gen.runtime.loader.quantize import QuantizationWish, quantize_module
from sglang.multimodal_gen.runtime.loader.stored_fp8 import refuse_unreadable, sort_stored
from sglang.multimodal_gen.runtime.loader.weights import LoadReceipt, load_weights
from sglang.multimodal_gen.runtime.memory.host_home import HostHome
from sglang.multimodal_gen.runtime.memory.layerwise import check_layer_names
from sglang.multimodal_gen.runtime.memory.offloaded_component import OffloadedComponent
from sglang.multimodal_gen.runtime.memory.weight_home import WeightHome
from sglang.multimodal_gen.runtime.models.registry import ModelRegistry
from sglang.multimodal_gen.runtime.platforms.device import device_facts
from sglang.multimodal_gen.runtime.server_args.resolve import fp8_problem
from sglang.multimodal_gen.runtime.utils.errors import (
    CheckpointError,
    InvalidArgument,
    PipelineDefinitionError,
)
from sglang.multimodal_gen.runtime.utils.precision import parse_precision

if TYPE_CHECKING:
    from sglang.multimodal_gen.runtime.utils.progress import ProgressListener

logger = logging.getLogger(__name__)

CONSTRUCTION_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What a constructor raises on a config that makes no sense; libraries check little themselves."""


@dataclass(frozen=True, kw_only=True)
class ComponentSpec:
    """One component to load: where it is, what ``model_index.json`` says, how it is wanted.

    ``library`` and ``architecture`` are None for a component that neither the index nor its own
    files name. ``weights`` is where its weights are, if not in its folder; ``default_config``
    stands for its ``config.json`` where there is none. ``parallel`` is this rank's place: which
    slices it holds. ``is_denoiser``: it is one, by its name or by that of ``model_index.json``.
    ``home`` takes its weights where they do not simply go to the device; ``quantization`` is what
    was asked for a denoiser's. Without ``stored`` there are no files of weights to look at.
    """

    name: str
    path: Path
    library: str | None
    architecture: str | None
    precision: str
    device: str
    parallel: ParallelState = field(default_factory=ParallelState.single)
    weights: Path | None = None
    default_config: Mapping[str, Any] | None = None
    is_denoiser: bool = False
    home: WeightHome | None = None
    quantization: QuantizationWish | None = None
    stored: bool = True

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its ``config.json``, read once.

        Raises:
            CheckpointError: the file is absent or no JSON object.
        """
        path = self.path / "config.json"
        if self.default_config is not None and not path.exists():
            return dict(self.default_config)
        return read_json_object(path)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """Its weights' files and headers, looked at once.

        Raises:
            CheckpointError: they are missing, damaged or ambiguous.
        """
        return find_checkpoint(self.path if self.weights is None else self.weights)

    def require_folder(self) -> None:
        """Raise CheckpointError unless the folder is there."""
        if not self.path.is_dir():
            raise CheckpointError(
                f"component {self.name!r} is missing: {self.path} is no folder. The checkpoint is "
                f"incomplete; fetch it again, or set --component-paths.{self.name}"
            )


@dataclass(frozen=True, slots=True)
class LoadedComponent:
    """A component that is ready: the object, how it was loaded, how long that took; ``offloaded``
    where its weights rest in host memory."""

    module: Any
    receipt: LoadReceipt | None
    seconds: float
    offloaded: OffloadedComponent | None = None


class ComponentLoader(ABC):
    """Loads components of one kind. A loader that is chosen fails on errors; none falls back."""

    def load(
        self, spec: ComponentSpec, progress: ProgressListener | None = None
    ) -> LoadedComponent:
        """Load one component.

        Raises:
            CheckpointError: its folder, config or weights are missing, damaged or do not fit.
            PipelineDefinitionError: this loader passes over the place its weights were to go to.
        """
        spec.require_folder()
        start = time.perf_counter()
        module, receipt = self.load_module(spec, progress)
        offloaded = None
        if isinstance(spec.home, HostHome):
            offloaded = spec.home.component
            if offloaded is None or offloaded.module is not module:
                raise PipelineDefinitionError(
                    f"{type(self).__name__} cannot load {spec.name!r} into host memory: it does "
                    "not hand `spec.home` to load_weights"
                )
        return LoadedComponent(module, receipt, time.perf_counter() - start, offloaded)

    @abstractmethod
    def load_module(
        self, spec: ComponentSpec, progress: ProgressListener | None
    ) -> tuple[Any, LoadReceipt | None]:
        """The object, and a receipt if weights were read."""


class NeuralComponentLoader(ComponentLoader):
    """Builds a module on the meta device and streams its weights into place."""

    exact_keys: ClassVar[bool] = False
    """Whether stored names must be the module's own, one to one: no renaming, nothing left out."""

    def load_module(
        self, spec: ComponentSpec, progress: ProgressListener | None
    ) -> tuple[nn.Module, LoadReceipt]:
        """The module, in eval mode, on its device and in its precision."""
        checkpoint = spec.checkpoint
        module, dtype = self.module_on_meta(spec)
        receipt = load_weights(
            module,
            checkpoint,
            device=spec.device,
            dtype=dtype,
            label=spec.name,
            progress=progress,
            home=spec.home,
            exact=self.exact_keys,
        )
        if spec.home is None and spec.parallel.device.type == "cuda":
            pack_linears(module)
        return module, receipt

    def module_on_meta(self, spec: ComponentSpec) -> tuple[nn.Module, torch.dtype]:
        """The module without weights, as this rank will hold it, and the dtype they are to have.

        Raises:
            CheckpointError: it is quantised in a way that is not read, or its config does not fit
                its class.
        """
        refuse_unreadable(spec.config, spec.name, spec.path)
        cls = self.model_class(spec)
        if not issubclass(cls, nn.Module):
            raise CheckpointError(f"component {spec.name!r}: {cls.__name__} is no torch module")
        dtype = parse_precision(spec.precision, field=f"component_precisions.{spec.name}")
        module = self.built_on_meta(cls, spec, dtype)
        check_layer_names(module)
        self.spread(module, spec)
        self.quantize(module, spec)
        return module, dtype

    def quantize(self, module: nn.Module, spec: ComponentSpec) -> None:
        """Make places for a denoiser's weights in eight bits; what others store so is widened.

        Raises:
            InvalidArgument: it cannot be on this device, or beside what else is asked for.
        """
        scales = sort_stored(spec.checkpoint, spec.name).scales if spec.stored else {}
        if not spec.is_denoiser or not (scales or spec.quantization):
            return
        paths = quantize_module(module, spec.quantization, scales)
        if paths and spec.home is not None and not isinstance(spec.home, HostHome):
            problem = f"the weights of {spec.name} are held in eight bits, which are not spread"
            raise InvalidArgument("use_fsdp_inference", True, f"{problem} over ranks; leave it out")
        if paths and spec.parallel.device.type == "cuda":
            problem = fp8_problem(device_facts().capability)
            if problem is not None:
                raise CheckpointError(f"component {spec.name!r} is stored in fp8: {problem}")

    def built_on_meta(self, cls: type, spec: ComponentSpec, dtype: torch.dtype) -> nn.Module:
        """The module without weights.

        Raises:
            CheckpointError: its config does not fit the class.
        """
        # Both libraries construct under the wanted dtype: buffers that a constructor computes
        # without naming a dtype follow it, and those that name one keep it.
        with default_dtype(dtype):
            return build_on_meta(lambda: self._built(cls, spec))

    def ways(self, cls: type, spec: ComponentSpec) -> int:
        """Over how many ranks `spread` will deal the weights, said before they are there."""
        return spec.parallel.tp.size if plan_of(cls) else 1

    def spread(self, module: nn.Module, spec: ComponentSpec) -> None:
        """Put a model's ``TP_PLAN`` in force, if it has one, over the ranks of tensor parallelism.

        The table is met on one rank too, so that a wrong row is found without a second GPU.

        Raises:
            InvalidArgument: a denoiser has none, or something in it does not divide.
            PipelineDefinitionError: the plan does not fit the model.
        """
        size, plan = spec.parallel.tp.size, plan_of(type(module))
        if not plan:
            if size > 1 and spec.is_denoiser:
                problem = (
                    f"{type(module).__name__} has no TP_PLAN, so each rank would hold all of it; "
                    "use --tp-size 1, or write the table in its file"
                )
                raise InvalidArgument("tp_size", size, problem)
            return
        planned = PlannedModel(module, plan)
        if wrong := planned.misfit(size):
            problem = f"{wrong} does not divide over tp_size={size}"
            raise InvalidArgument("tp_size", size, problem)
        planned.apply(spec.parallel.tp)

    def model_class(self, spec: ComponentSpec) -> type:
        """The registered class, else the class that ``model_index.json`` names in its library."""
        name = self.architecture(spec)
        if ModelRegistry.knows(name):
            return ModelRegistry.resolve_model_cls(name)[0]
        return library_class(spec.name, spec.library, name)

    def architecture(self, spec: ComponentSpec) -> str:
        """The architecture's name: ``config.json``'s, else ``model_index.json``'s.

        Raises:
            CheckpointError: neither names it.
        """
        name = spec.config.get("_class_name") or spec.architecture
        if not isinstance(name, str):
            raise CheckpointError(
                f"component {spec.name!r}: neither {spec.path / 'config.json'} nor the model index "
                "names its class"
            )
        return name

    def build(self, cls: type, spec: ComponentSpec) -> nn.Module:
        """An instance, made from the config's non-metadata fields; called where it is cheap."""
        fields = {key: value for key, value in spec.config.items() if not key.startswith("_")}
        if cls.__init__.__module__.startswith("diffusers."):  # a subclass that keeps it, too
            # The library's releases add and retire fields; its own loading drops them like this.
            known = inspect.signature(cls).parameters
            unknown = [key for key in fields if key not in known]
            if unknown:
                logger.warning(
                    "%s: %s of this diffusers takes no %s; left out.",
                    spec.name, cls.__name__, ", ".join(unknown),
                )  # fmt: skip
            fields = {key: value for key, value in fields.items() if key in known}
        return cls(**fields)

    def _built(self, cls: type, spec: ComponentSpec) -> nn.Module:
        try:
            return self.build(cls, spec)
        except CONSTRUCTION_ERRORS as error:
            raise CheckpointError(
                f"component {spec.name!r}: {spec.path / 'config.json'} does not fit "
                f"{cls.__name__}: {type(error).__name__}: {error}"
            ) from error


class PlainStateDictComponentLoader(NeuralComponentLoader):
    """For auxiliary modules: a registered class, ``model_cls(**config)``, an unchanged state dict.

    Select it by name in a pipeline's ``component_loaders``. Keys and shapes are strict: what the
    class says to other loaders of renaming and leaving out is not heard. Each rank holds all of it.
    """

    exact_keys = True

    def model_class(self, spec: ComponentSpec) -> type:
        """The registered class; libraries are not searched."""
        return ModelRegistry.resolve_model_cls(self.architecture(spec))[0]

    def ways(self, cls: type, spec: ComponentSpec) -> int:
        """One: nothing is dealt."""
        return 1

    def quantize(self, module: nn.Module, spec: ComponentSpec) -> None:
        """Nothing is quantised, and nothing that is stored so is read.

        Raises:
            CheckpointError: its checkpoint is quantised.
            InvalidArgument: it was asked for.
        """
        if spec.config.get("quantization_config") or sort_stored(spec.checkpoint, spec.name).scales:
            raise CheckpointError(
                f"component {spec.name!r}: {spec.path} is quantised, which {type(self).__name__} "
                "does not read; use the unquantised checkpoint"
            )
        if spec.quantization is not None:
            problem = f"{type(self).__name__} quantises nothing, and loads {spec.name!r} here"
            raise InvalidArgument("quantization", spec.quantization.name, problem)

    def spread(self, module: nn.Module, spec: ComponentSpec) -> None:
        """Nothing is dealt over ranks, whatever table the class has.

        Raises:
            InvalidArgument: it is a denoiser, which no rank may hold whole beside others.
        """
        size = spec.parallel.tp.size
        if size > 1 and spec.is_denoiser:
            raise InvalidArgument(
                "tp_size",
                size,
                f"{type(self).__name__} deals nothing over ranks, so each would hold all of the "
                f"denoiser {spec.name!r}; use --tp-size 1, or another loader",
            )
