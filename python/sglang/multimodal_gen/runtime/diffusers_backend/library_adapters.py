"""LoRA adapters as Diffusers and PEFT hold them, in the layers of a pipeline's components."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.loaders.lora_base import LoraBaseMixin
from diffusers.utils import USE_PEFT_BACKEND
from torch import Tensor, nn

from sglang.multimodal_gen.runtime.diffusers_backend.library_messages import library_messages
from sglang.multimodal_gen.runtime.layers.lora.adapter_keys import parse_adapter_key
from sglang.multimodal_gen.runtime.layers.lora.normal_form import checked_values
from sglang.multimodal_gen.runtime.layers.lora.receipt import (
    LoRAReceipt,
    listed,
    refuse_no_change,
    why_nothing,
)
from sglang.multimodal_gen.runtime.loader.lora_file import LoRAFile
from sglang.multimodal_gen.runtime.pipelines_core.lora_selection import LoadedAdapter, Selection
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError

# What the loaders and PEFT raise for a file that does not fit.
_UNFIT = (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError,
          NotImplementedError)  # fmt: skip
_OLD_NAME = re.compile(r"\.processor\.(to_\w+?)_lora\.")
_FACTOR = re.compile(r"lora(_[AB]\b|_linear_layer|\.(up|down)\b|_(up|down)\b)")


def no_adapters(pipeline_class: type[Any]) -> str | None:
    """Why a pipeline class takes no adapters; None if it does."""
    if not issubclass(pipeline_class, LoraBaseMixin) or not pipeline_class._lora_loadable_modules:
        return f"{pipeline_class.__name__} of Diffusers takes no LoRA adapters"
    if not USE_PEFT_BACKEND:
        return (
            "adapters on the Diffusers backend need the package peft: "
            "pip install 'sglang-diffusion[diffusers]'"
        )
    return None


@dataclass(frozen=True, slots=True, eq=False)
class LibraryAdapter(LoadedAdapter):
    """An adapter whose factors are in the pipeline's layers, under ``key``.

    ``layers`` has its components, without factors: those are the library's.
    """

    key: str


class LibraryAdapters:
    """The adapters that are loaded into one Diffusers pipeline, and which of them count.

    Keys are made here: the library wants names without dots, none within another.
    """

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self._numbers = itertools.count()
        self._keys: set[str] = set()
        self._weights: dict[str, dict[str, float]] = {}
        """Key -> component -> weight of what is in force."""
        self._base: dict[str, dict[str, Tensor]] = {}
        """Component -> layer -> its weight before adapters were fused into it; on the host."""

    @property
    def components(self) -> list[str]:
        """The components that adapters may change."""
        if no_adapters(type(self.pipeline)) is not None:
            return []
        names = self.pipeline._lora_loadable_modules
        return [name for name in names if isinstance(getattr(self.pipeline, name, None), nn.Module)]

    def load(self, file: LoRAFile, nickname: str) -> LibraryAdapter:
        """Read a file into the pipeline's layers; the library puts it in force: see `enforce`.

        Raises:
            CheckpointError: the library cannot read it, or it changes nothing.
        """
        _check_file(file)
        self._unmerge()
        key = f"adapter{next(self._numbers):06d}"
        self._keys.add(key)
        try:
            with library_messages():
                self.pipeline.load_lora_weights(
                    str(file.path.parent),
                    weight_name=file.path.name,
                    adapter_name=key,
                    use_safetensors=True,
                    local_files_only=True,
                )
            changed = self._changed(file, key)
            receipt = self._receipt(file, nickname, key, changed)
            _check_scaling(file, receipt)
            refuse_no_change(receipt)
        except BaseException as error:
            self._drop(key)
            if isinstance(error, CheckpointError) or not isinstance(error, _UNFIT):
                raise
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{file.path}: Diffusers cannot load it: {type(error).__name__}: {reason}. "
                f"{self._both_sides(file)}"
            ) from error
        for name in changed:
            getattr(self.pipeline, name).eval()  # new layers come in training mode
        layers = {name: {} for name in changed}
        return LibraryAdapter(nickname, file.path.resolve(), file.stamp, layers, receipt, key)

    def delete(self, adapter: LibraryAdapter) -> None:
        """Take an adapter's factors out of the pipeline."""
        self._unmerge()
        self._drop(adapter.key)

    def enforce(self, selections: Mapping[str, Selection]) -> None:
        """Make each component compute with exactly its selection; the others are the base.

        Fused weights come back from a copy: subtracting what was added would not give the bits.
        """
        self._unmerge()
        self._weights = {}
        force = {c: s for c, s in selections.items() if s.effective}
        weights: dict[str, dict[str, float]] = {}
        for component, selection in force.items():
            for adapter, weight in selection.chosen:
                assert isinstance(adapter, LibraryAdapter)
                every = weights.setdefault(adapter.key, dict.fromkeys(adapter.layers, 0.0))
                every[component] = weight * selection.factor
        self._weights = weights
        self.refresh()
        for component in self.components:
            for _, layer in self._tuned(component):
                layer.enable_adapters(component in force)
        for component, selection in force.items():
            if selection.mode == "merged":
                self._merge(component, [key for key, w in weights.items() if w.get(component)])

    def refresh(self) -> None:
        """Set the weights in force again: a call may have left others in the layers.

        A pipeline's own ``scale`` argument multiplies them and divides afterwards, which loses a
        weight where it is 0, and where the call ends in between.
        """
        if self._weights:
            self.pipeline.set_adapters(list(self._weights), list(self._weights.values()))

    # Parts.

    def _merge(self, component: str, keys: list[str]) -> None:
        self._base[component] = {
            name: layer.get_base_layer().weight.detach().to("cpu", copy=True)
            for name, layer in self._tuned(component)
            if any(key in layer.lora_A for key in keys)
        }
        self.pipeline.fuse_lora(components=[component], adapter_names=keys)

    def _unmerge(self) -> None:
        for component, base in list(self._base.items()):
            self.pipeline.unfuse_lora(components=[component])
            layers = dict(self._tuned(component))
            with torch.no_grad():
                for name, weight in base.items():
                    layers[name].get_base_layer().weight.copy_(weight)
            del self._base[component]

    def _drop(self, key: str) -> None:
        self._keys.discard(key)
        with library_messages():
            if self._keys:
                self.pipeline.delete_adapters([key])
            else:  # the layers are plain ones again
                self.pipeline.unload_lora_weights()

    def _tuned(self, component: str) -> Iterator[tuple[str, Any]]:
        """The layers of a component that hold adapters, by the path of the layer they wrap."""
        from peft.tuners.tuners_utils import BaseTunerLayer  # an extra

        for name, module in getattr(self.pipeline, component).named_modules():
            if isinstance(module, BaseTunerLayer):
                yield name, module

    def _layers(self, component: str, key: str) -> Iterator[tuple[str, Any]]:
        return ((name, layer) for name, layer in self._tuned(component) if key in layer.lora_A)

    def _changed(self, file: LoRAFile, key: str) -> dict[str, dict[str, Any]]:
        """Component -> path -> layer that has the adapter's factors, at weight 1."""
        changed = {name: dict(self._layers(name, key)) for name in self.components}
        changed = {name: layers for name, layers in changed.items() if layers}
        if not changed:
            raise CheckpointError(
                f"{file.path} changes nothing of this pipeline: none of its {len(file.tensors)} "
                f"tensors fits a module of {', '.join(self.components)}. "
                f"{self._both_sides(file)} Likely cause: an adapter for another model."
            )
        for layer in (layer for layers in changed.values() for layer in layers.values()):
            layer.set_scale(key, 1.0)  # a text encoder's comes scaled as the last call was
        return changed

    def _receipt(
        self, file: LoRAFile, nickname: str, key: str, changed: Mapping[str, Mapping[str, Any]]
    ) -> LoRAReceipt:
        layers = [layer for found in changed.values() for layer in found.values()]
        factors = [name for name in self._names(file) if _FACTOR.search(name)]
        paths = {f"{c}.{_plain(path)}." for c, found in changed.items() for path in found}
        # Two factors a layer: where names were changed beyond comparing, the count still tells.
        taken = [name for name in factors if any(_plain(name).startswith(path) for path in paths)]
        missed = len(factors) - min(len(factors), 2 * len(layers))
        unmatched = [name for name in factors if name not in set(taken)] if missed else []
        alphas = any(name.endswith(".alpha") for name in file.tensors)
        source = "alpha tensors" if alphas else "file metadata" if file.configs else "none"
        return LoRAReceipt(
            nickname=nickname,
            path=str(file.path),
            format="read by Diffusers",
            ranks=tuple(sorted({layer.r[key] for layer in layers})),
            alpha_source=source,
            scaling=dict(Counter(layer.scaling[key] for layer in layers)),
            modules={name: tuple(sorted(found)) for name, found in changed.items()},
            relative_change={
                name: _relative_change(file, name, found, key) for name, found in changed.items()
            },
            matched=tuple(name for name in factors if name not in unmatched),
            unmatched=tuple(unmatched),
            unsupported=(),
        )

    def _names(self, file: LoRAFile) -> list[str]:
        """The file's tensors under the names that Diffusers gives them."""
        read = self.pipeline.lora_state_dict
        with library_messages():
            state = read(str(file.path.parent), weight_name=file.path.name, use_safetensors=True,
                         local_files_only=True)  # fmt: skip
        return list(state[0] if isinstance(state, tuple) else state)

    def _both_sides(self, file: LoRAFile) -> str:
        ours = [
            f"{name}.{path}"
            for name in self.components
            for path, module in getattr(self.pipeline, name).named_modules()
            if isinstance(module, nn.Linear)
        ]
        theirs = list(file.tensors)
        with contextlib.suppress(*_UNFIT):
            theirs = self._names(file)
        return f"It has: {listed(theirs)}. The model has: {listed(ours)}."


def _plain(name: str) -> str:
    """A path without what Diffusers' older and newer spellings differ in."""
    return _OLD_NAME.sub(r".\1.", name).replace("to_out.0", "to_out")


def _check_file(file: LoRAFile) -> None:
    """Refuse what the library would take without a word: values that are no numbers."""
    if not any(parse_adapter_key(name) for name in file.tensors):
        raise CheckpointError(why_nothing(str(file.path), file.tensors, {}))
    for name, tensor in file.read().items():
        if parse_adapter_key(name) is not None:
            checked_values(str(file.path), name, tensor)


def _relative_change(file: LoRAFile, component: str, layers: Mapping[str, Any], key: str) -> float:
    change = weight = 0.0
    with torch.no_grad():
        for path, layer in layers.items():
            delta = layer.get_delta_weight(key).float().norm().item()
            if not math.isfinite(delta):
                raise CheckpointError(
                    f"{file.path}: its change of {component}.{path} is too large for its weights "
                    f"(scaled by {layer.scaling[key]:.3g})."
                )
            change += delta**2
            weight += layer.get_base_layer().weight.float().norm().item() ** 2
    if not change:
        return 0.0
    return (change / weight) ** 0.5 if weight else float("inf")


def _check_scaling(file: LoRAFile, receipt: LoRAReceipt) -> None:
    """Refuse a file whose scaling is said beside it, where Diffusers does not look."""
    config = file.configs.get("")
    if config is None or config.source != "adapter_config.json":
        return
    alpha = receipt.ranks[0] if config.alpha is None else config.alpha
    wanted = {alpha / (r**0.5 if config.rank_stabilized else r) for r in receipt.ranks}
    if config.alpha_pattern or wanted != set(receipt.scaling):
        raise CheckpointError(
            f"{file.path}: its scaling is in adapter_config.json, which Diffusers does not read: "
            f"it would apply x{', x'.join(f'{s:.4g}' for s in receipt.scaling)}. Save it with "
            "save_lora_weights of Diffusers, which writes the scaling into the file."
        )
