"""Pipelines whose components take LoRA adapters."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from sglang.multimodal_gen.configs.lora_choice import LoRAChoice
from sglang.multimodal_gen.runtime.layers.lora.adapted_module import AdaptedModule
from sglang.multimodal_gen.runtime.layers.lora.normal_form import NormalForm, to_normal_form
from sglang.multimodal_gen.runtime.layers.lora.receipt import (
    LoRAReceipt,
    listed,
    refuse_no_change,
    why_nothing,
)
from sglang.multimodal_gen.runtime.loader.lora_file import LoRAFile, find_lora_file
from sglang.multimodal_gen.runtime.pipelines_core.composed_pipeline_base import (
    ComposedPipelineBase,
)
from sglang.multimodal_gen.runtime.pipelines_core.lora_arguments import (
    MergeMode,
    check_new_name,
    check_weight,
    merge_mode_of,
    not_loaded,
    one_each,
    texts_of,
)
from sglang.multimodal_gen.runtime.pipelines_core.lora_selection import (
    LoadedAdapter,
    Selection,
    select,
)
from sglang.multimodal_gen.runtime.utils.component_roles import role_of
from sglang.multimodal_gen.runtime.utils.errors import (
    CheckpointError,
    InvalidArgument,
    InvalidRequest,
)
from sglang.multimodal_gen.runtime.utils.suggest import did_you_mean

logger = logging.getLogger(__name__)

MAX_ROUNDING_LOSS = 0.5
"""``auto`` runs an adapter live where merging it would lose more than this share to rounding."""
REQUEST_FILES_KEPT = 4
"""Files that requests named by path and that stay read, for the next one that names them."""


class LoRAPipeline(ComposedPipelineBase):
    """A pipeline on which adapters can be loaded, weighted, merged and taken off again.

    Loading puts an adapter into host memory and changes nothing. `set_lora` chooses which loaded
    adapters are in force from now on; `request_adapters` does so for one request. Every change
    starts from the base, which is never lost: taking adapters off restores it bit for bit.
    """

    lora_targets: ClassVar[tuple[str, ...]] = ("transformer", "transformer_2")
    """Denoisers that adapters may change; text encoders always can."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lora_lock = threading.RLock()
        self._adapters: dict[str, LoadedAdapter] = {}
        self._request_files: dict[str, LoadedAdapter] = {}
        self._adapted: dict[str, AdaptedModule] = {}
        self._selections: dict[str, Selection] = {}

    # Loading.

    def load_lora_adapter(
        self, lora_path: str, lora_nickname: str, rank: int = 0, weight_name: str | None = None
    ) -> LoRAReceipt:
        """Read an adapter file into host memory under a name; it is not in force yet.

        Loading the same file under the same name again does nothing. ``rank`` is this process's
        number; ``weight_name`` is the file in a folder that holds several.

        Raises:
            CheckpointError: no such file, damaged, not LoRA, or made for another model.
            InvalidArgument: the name belongs to another file.
        """
        check_new_name(lora_nickname, lora_path)
        with self._lora_lock:
            file = find_lora_file(os.fspath(lora_path), weight_name)
            known = self._adapters.get(lora_nickname)
            if known is None:
                known = self._adapters[lora_nickname] = self._read(file, lora_nickname)
            elif (known.path, known.stamp) != (file.path.resolve(), file.stamp):
                what = "another file" if known.path != file.path.resolve() else "an older version"
                raise InvalidArgument(
                    "lora_nickname",
                    lora_nickname,
                    f"is {what}: {known.path}. Use another nickname, or unload it first",
                )
            return known.receipt

    def unload_lora_adapter(self, lora_nickname: str) -> None:
        """Forget an adapter; it is taken out of whatever is in force."""
        with self._lora_lock:
            adapter = self._loaded(lora_nickname)
            for component, selection in list(self._selections.items()):
                left = tuple(item for item in selection.chosen if item[0] is not adapter)
                if left != selection.chosen:
                    mode = selection.mode if left else "off"
                    self._apply(component, replace(selection, chosen=left, mode=mode))
            del self._adapters[lora_nickname]
            self._forget(adapter)

    def _read(self, file: LoRAFile, nickname: str) -> LoadedAdapter:
        components = self._components()
        indexes = {name: self._adapted_module(name).index for name in components}
        normal = to_normal_form(file.read(), indexes, file.configs, str(file.path))
        if not normal.layers:
            raise CheckpointError(self._no_match(file, normal))
        receipt = self._receipt(file, nickname, normal)
        refuse_no_change(receipt)
        log = logger.warning if receipt.leftovers() else logger.info
        log("%s", receipt.summary())
        return LoadedAdapter(nickname, file.path.resolve(), file.stamp, normal.layers, receipt)

    def _receipt(self, file: LoRAFile, nickname: str, normal: NormalForm) -> LoRAReceipt:
        linears = [factors for layers in normal.layers.values() for factors in layers.values()]
        return LoRAReceipt(
            nickname=nickname,
            path=str(file.path),
            format="+".join(normal.styles),
            ranks=tuple(sorted({factors.rank for factors in linears})),
            alpha_source=" and ".join(normal.alpha_sources),
            scaling=dict(Counter(factors.scaling for factors in linears)),
            modules={name: tuple(sorted(layers)) for name, layers in normal.layers.items()},
            relative_change={
                name: self._adapted_module(name).relative_change(layers)
                for name, layers in normal.layers.items()
            },
            matched=normal.matched,
            unmatched=normal.unmatched,
            unsupported=normal.unsupported,
        )

    def _no_match(self, file: LoRAFile, normal: NormalForm) -> str:
        if normal.reasons or not normal.unmatched:
            return why_nothing(str(file.path), file.tensors, normal.reasons)
        theirs = list(normal.unmatched)
        ours = [
            f"{name}.{path}"
            for name in self._components()
            for path in list(self._adapted_module(name).index.linears)[-3:]
        ]
        return (
            f"{file.path} changes nothing of this pipeline: none of its {len(file.tensors)} "
            f"tensors names a module of {', '.join(self._components())}. It has: "
            f"{listed(theirs)}. The model has: {listed(ours)}. "
            "Likely cause: an adapter for another model."
        )

    # What is in force.

    def set_lora(
        self,
        lora_nickname: str | Sequence[str],
        lora_path: str | Sequence[str | None] | None = None,
        target: str | Sequence[str] = "all",
        strength: float | Sequence[float] = 1.0,
        merge_weights: bool | None = None,
        merge_mode: MergeMode | None = None,
    ) -> tuple[LoRAReceipt, ...]:
        """Put adapters in force until further notice, in place of those that were.

        Args:
            lora_nickname: one name or several; several add up. No name (``[]``) is the base, as a
                request's ``lora=[]`` is: `unset_lora` of the targets.
            lora_path: the file of each name that is not loaded yet.
            target: a component, or "all" that the adapter has keys for; one for each name, or one
                for all of them. Components that no target names keep what they have.
            strength: weight of each adapter; 0 leaves it out, negative turns it round.
            merge_weights: True means ``merge_mode="merge"``, False ``"dynamic"``.
            merge_mode: "merge" puts the sum into the weights, at no cost in the loop; "dynamic"
                adds it in each forward; "auto" (the default) merges unless the weights' precision
                would lose most of it.

        Raises:
            InvalidArgument: lists of different lengths, an unknown name without path, a target
                that is no component or that the adapter does not change, a weight that is none.
            CheckpointError: as `load_lora_adapter`. In either case all is as before: what this call
                loaded is unloaded, and what was in force is in force.
        """
        names = texts_of("lora_nickname", lora_nickname)
        count = len(names)
        paths = one_each("lora_path", lora_path, count)
        if not names:
            self.unset_lora(target)
            return ()
        texts_of("target", target)
        targets = one_each("target", target, count)
        weights = one_each("strength", strength, count)
        for weight in weights:
            check_weight("strength", weight)
        mode = merge_mode_of(merge_weights, merge_mode)
        with self._lora_lock, ExitStack() as undo:
            for name in targets:
                self._check_target(name)
            undo.callback(self._unload_all_but, set(self._adapters))
            chosen = [
                self._loaded(name) if path is None else self._load(path, name)
                for name, path in zip(names, paths, strict=True)
            ]
            wanted: dict[str, list[tuple[LoadedAdapter, float]]] = {}
            for adapter, name, weight in zip(chosen, targets, weights, strict=True):
                if name != "all" and name not in adapter.layers:
                    problem = f"lora {adapter.nickname!r} changes {', '.join(adapter.layers)} only"
                    raise InvalidArgument("target", name, problem)
                for component in self._components() if name == "all" else [name]:
                    wanted.setdefault(component, []).append((adapter, float(weight)))
            for component, choices in wanted.items():
                undo.callback(self._apply, component, self._selection(component))
                selection = select(choices, component, "live" if mode == "dynamic" else "merged")
                self._apply(component, selection, may_run_live=mode == "auto")
            undo.pop_all()
            return tuple(adapter.receipt for adapter in chosen)

    def merge_lora_weights(
        self, target: str | Sequence[str] = "all", strength: float = 1.0
    ) -> None:
        """Put the chosen adapters into the weights; ``strength`` multiplies their weights."""
        check_weight("strength", strength)
        with self._lora_lock:
            for component in self._targets(target):
                selection = self._selection(component)
                if selection.chosen:
                    merged = replace(selection, mode="merged", factor=float(strength))
                    self._apply(component, merged)

    def unmerge_lora_weights(self, target: str | Sequence[str] = "all") -> None:
        """Take merged adapters out of the weights; they stay chosen, for `merge_lora_weights`.

        Adapters that run live are not in the weights, and stay in force.
        """
        with self._lora_lock:
            for component in self._targets(target):
                if self._selection(component).mode == "merged":
                    self._apply(component, replace(self._selection(component), mode="off"))

    def deactivate_lora_weights(self, target: str | Sequence[str] = "all") -> None:
        """Take adapters out of force, merged or live; they stay chosen."""
        with self._lora_lock:
            for component in self._targets(target):
                self._apply(component, replace(self._selection(component), mode="off"))

    def unset_lora(self, target: str | Sequence[str] = "all") -> None:
        """Take adapters out of force and out of the choice; they stay loaded."""
        with self._lora_lock:
            for component in self._targets(target):
                self._apply(component, Selection())

    @contextmanager
    def request_adapters(self, choices: Sequence[LoRAChoice] | None) -> Iterator[list[LoRAReceipt]]:
        """Run one request with exactly these adapters, live; what was in force comes back after it.

        None keeps what `set_lora` put in force; an empty list is the base. No other thread changes
        adapters meanwhile.

        Raises:
            InvalidRequest: a name is not loaded.
            CheckpointError: as `load_lora_adapter`.
        """
        with self._lora_lock:
            if choices is None:
                yield []
                return
            chosen = [(self._chosen(choice), choice.weight) for choice in choices]
            before = {name: self._selection(name) for name in self._components()}
            with ExitStack() as afterwards:
                for component, selection in before.items():
                    afterwards.callback(self._apply, component, selection)
                for component in before:
                    self._apply(component, select(chosen, component, "live"))
                yield [adapter.receipt for adapter, _ in chosen]
            while len(self._request_files) > REQUEST_FILES_KEPT:
                self._forget(self._request_files.pop(next(iter(self._request_files))))

    # What is known.

    def get_lora_status(self) -> dict[str, Any]:
        """``loaded_adapters``, and by component those that are ``active`` (in force)."""
        return {
            "loaded_adapters": [
                {"nickname": adapter.nickname, "path": str(adapter.path)}
                for adapter in self._adapters.values()
            ],
            "active": {
                component: [
                    {
                        "nickname": adapter.nickname,
                        "path": str(adapter.path),
                        "strength": weight * selection.factor,
                        "merged": selection.mode == "merged",
                    }
                    for adapter, weight in selection.chosen
                ]
                for component, selection in self._selections.items()
                if selection.effective
            },
        }

    def is_lora_effective(self, target: str = "all") -> bool:
        """Whether an adapter changes what a component (any component) computes."""
        return any(self._selection(name).effective for name in self._targets(target))

    def is_lora_set(self, target: str = "all") -> bool:
        """Whether an adapter is chosen for a component (any), in force or not."""
        return any(bool(self._selection(name).chosen) for name in self._targets(target))

    # Parts.

    def _apply(self, component: str, wanted: Selection, *, may_run_live: bool = False) -> None:
        """Make ``wanted`` what the component runs with; a failure leaves it with nothing."""
        current = self._selection(component)
        if wanted == current:
            return
        if self.graphs is not None:
            self.graphs.drop()  # they compute what was in force
        try:
            self._put_in_force(component, wanted, may_run_live)
        finally:
            if self.compiled is not None:
                self.compiled.refresh()

    def _put_in_force(self, component: str, wanted: Selection, may_run_live: bool) -> None:
        module = self._adapted_module(component)
        if may_run_live and module.runs_live_only:
            wanted = replace(wanted, mode="live")
        self._selections[component] = Selection()
        terms = wanted.terms(component)
        if not terms:
            module.clear()
        elif wanted.mode == "live":
            module.run_live(terms)
        else:
            loss = module.merge(terms)
            if may_run_live and loss > MAX_ROUNDING_LOSS:
                logger.info(
                    "%s: merged, rounding would take %.0f%% of the adapters' change; they run live",
                    component,
                    100 * loss,
                )
                wanted = replace(wanted, mode="live")
                module.run_live(terms)
        self._selections[component] = wanted

    def _selection(self, component: str) -> Selection:
        return self._selections.get(component, Selection())

    def _adapted_module(self, component: str) -> AdaptedModule:
        if component not in self._adapted:
            self._adapted[component] = AdaptedModule(self.modules[component], self.parallel.device)
        return self._adapted[component]

    def _components(self) -> list[str]:
        """The components that adapters may change, denoisers first."""
        encoders = [name for name in self.modules if role_of(name) == "text_encoder"]
        names = [name for name in self.lora_targets if name in self.modules] + encoders
        return [name for name in names if isinstance(self.modules[name], nn.Module)]

    def _targets(self, target: str | Sequence[str]) -> list[str]:
        names = texts_of("target", target)
        for name in names:
            self._check_target(name)
        return self._components() if "all" in names else names

    def _check_target(self, name: str) -> None:
        known = ["all", *self._components()]
        if name not in known:
            problem = f"choose one of {', '.join(known)}.{did_you_mean(name, known)}"
            raise InvalidArgument("target", name, problem)

    def _load(self, path: str, name: str) -> LoadedAdapter:
        self.load_lora_adapter(path, name)
        return self._adapters[name]

    def _unload_all_but(self, names: Collection[str]) -> None:
        for name in [name for name in self._adapters if name not in names]:
            self.unload_lora_adapter(name)

    def _loaded(self, name: str) -> LoadedAdapter:
        if name not in self._adapters:
            raise InvalidArgument("lora_nickname", name, not_loaded(name, self._adapters))
        return self._adapters[name]

    def _chosen(self, choice: LoRAChoice) -> LoadedAdapter:
        """The adapter that a request means; files named by path are kept for a few requests."""
        if not choice.is_path:
            if choice.adapter not in self._adapters:
                problem = not_loaded(choice.adapter, self._adapters)
                raise InvalidRequest("lora", choice.adapter, problem)
            return self._adapters[choice.adapter]
        file = find_lora_file(choice.adapter)
        key = str(file.path.resolve())
        known = self._request_files.pop(key, None)
        if known is not None and known.stamp != file.stamp:
            self._forget(known)
            known = None
        if known is None:
            known = self._read(file, choice.adapter)
        self._request_files[key] = known  # the last used stands last
        return known

    def _forget(self, adapter: LoadedAdapter) -> None:
        """An adapter that is in force nowhere is let go of; its tensors go with the object."""
