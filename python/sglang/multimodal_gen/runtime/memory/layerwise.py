"""What a model says about itself so that its weights can be streamed block by block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from sglang.multimodal_gen.runtime.utils.errors import PipelineDefinitionError


class LayerwiseOffloadableModuleMixin:
    """Mixin of a module whose repeated blocks can live in host memory.

    List every list of blocks; each block's own ``forward`` must be the only user of its weights.
    Modules that are no denoiser set ``layerwise_offload_dit_group_enabled = False``, so that the
    group ``dit`` of ``--layerwise-offload-components`` leaves them out.
    """

    layer_names: ClassVar[list[str]] = []
    """Dotted paths to ``nn.ModuleList`` or ``nn.Sequential``, in the order in which they run."""
    layerwise_offload_dit_group_enabled: ClassVar[bool] = True


def streams(component: object) -> bool:
    """Whether a component, or a class of components, can be streamed block by block."""
    cls = component if isinstance(component, type) else type(component)
    return issubclass(cls, LayerwiseOffloadableModuleMixin) and bool(cls.layer_names)


def streamed_blocks(module: nn.Module) -> Mapping[str, nn.Module]:
    """Path -> block, for all blocks that a module lists, in running order.

    Raises:
        PipelineDefinitionError: a path of ``layer_names`` leads nowhere, to something else than a
            list of modules, or into another one; or there are none.
    """
    owner = type(module).__name__
    names = list(getattr(module, "layer_names", ()))
    if not names:
        raise PipelineDefinitionError(f"{owner}.layer_names is empty: there is no block to stream")
    blocks: dict[str, nn.Module] = {}
    for name in names:
        for block_path, block in _list_at(module, name, owner).named_children():
            blocks[f"{name}.{block_path}"] = block
    for outer in names:
        inner = [name for name in names if name.startswith(f"{outer}.")]
        if inner or names.count(outer) > 1:
            raise PipelineDefinitionError(
                f"{owner}.layer_names lists {(inner or [outer])[0]!r} twice: it is part of "
                f"{outer!r} already"
            )
    return blocks


def check_layer_names(module: nn.Module) -> None:
    """Raise PipelineDefinitionError if a module with the mixin lists what it does not have."""
    if isinstance(module, LayerwiseOffloadableModuleMixin) and module.layer_names:
        streamed_blocks(module)


def _list_at(module: nn.Module, name: str, owner: str) -> nn.Module:
    try:
        found = module.get_submodule(name)
    except AttributeError:
        raise PipelineDefinitionError(
            f"{owner}.layer_names names {name!r}, which the module does not have. Lists it has: "
            f"{', '.join(_lists(module)) or 'none'}"
        ) from None
    if not isinstance(found, nn.ModuleList | nn.Sequential):
        raise PipelineDefinitionError(
            f"{owner}.layer_names names {name!r}, a {type(found).__name__}; it must be a "
            f"ModuleList or Sequential. Lists it has: {', '.join(_lists(module)) or 'none'}"
        )
    return found


def _lists(module: nn.Module) -> list[str]:
    return [
        name
        for name, child in module.named_modules()
        if name and isinstance(child, nn.ModuleList | nn.Sequential)
    ]
