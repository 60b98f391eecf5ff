"""``/v1/loras``: the adapters that requests may name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from sglang.multimodal_gen.runtime.entrypoints.http.context import context_of
from sglang.multimodal_gen.runtime.entrypoints.http.errors import ApiError, not_found
from sglang.multimodal_gen.runtime.entrypoints.http.openapi import error_replies, example_reply
from sglang.multimodal_gen.runtime.managers.client_error import ClientError
from sglang.multimodal_gen.runtime.managers.service import GenerationService

router = APIRouter(prefix="/v1/loras", tags=["loras"])


class LoRALoad(BaseModel):
    """Which file to load, and under which name."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"name": "ink", "file": "ink.safetensors"}]},
    )

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$", description="What requests call it."
    )
    file: str = Field(
        min_length=1,
        max_length=500,
        description="A safetensors file, or a folder with one, under a --lora-root.",
    )


class LoRAList(BaseModel):
    """The adapters in memory, and which are in force, with their weights, by component."""

    object: str = "list"
    data: list[dict[str, Any]]
    active: dict[str, list[dict[str, Any]]]


_LIST = {
    "object": "list",
    "data": [{"name": "ink"}],
    "active": {"transformer": [{"name": "ink", "strength": 0.8, "merged": True}]},
}


@router.get("", responses=example_reply(_LIST) | error_replies(503))
async def list_loras(request: Request) -> LoRAList:
    """The adapters that requests may name."""
    return _listed(context_of(request).lifecycle.service)


@router.post(
    "",
    responses=example_reply({"name": "ink", "ranks": [16], "unused": []})
    | error_replies(400, 403, 404, 500, 503),
)
async def load_lora(request: Request, body: LoRALoad) -> dict[str, Any]:
    """Load an adapter from the server's folders; it waits for the batch that runs."""
    context = context_of(request)
    service = context.lifecycle.service
    roots = context.args.keep.lora_roots
    if not roots:
        message = "this server loads no adapters for clients; it was started without --lora-root"
        raise ApiError(ClientError(403, message, code="not_allowed"))
    path = await run_in_threadpool(_within, body.file, roots)
    if path is None:
        message = "file: no such adapter under this server's folders"
        raise not_found(message, param="file", code="lora_not_found")
    return await asyncio.wrap_future(_uncancelled(service.load_adapter(body.name, str(path))))


@router.delete(
    "/{name}", responses=example_reply({"deleted": True, "name": "ink"}) | error_replies(404, 503)
)
async def unload_lora(request: Request, name: str) -> dict[str, Any]:
    """Forget an adapter. Requests that wait for it will fail."""
    service = context_of(request).lifecycle.service
    if name not in service.adapter_names:
        raise not_found("no adapter of that name is loaded", param="name", code="lora_not_found")
    await asyncio.wrap_future(_uncancelled(service.unload_adapter(name)))
    return {"deleted": True, "name": name}


def _uncancelled(future: Any) -> Any:
    """A client that goes away must not cancel what the runner's thread will answer."""
    future.set_running_or_notify_cancel()
    return future


def _listed(service: GenerationService) -> LoRAList:
    """The status without the paths of this machine."""
    status = service.adapters
    return LoRAList(
        data=[{"name": name} for name in service.adapter_names],
        active={
            component: [
                {"name": a["nickname"], "strength": a["strength"], "merged": a["merged"]}
                for a in adapters
            ]
            for component, adapters in status["active"].items()
        },
    )


def _within(file: str, roots: tuple[str, ...]) -> Path | None:
    """The path of a file under a root, links followed; None for all else, told apart by nobody."""
    if "\0" in file or Path(file).is_absolute() or ".." in Path(file).parts:
        return None
    for root in roots:
        base = Path(root).resolve()
        try:
            path = (base / file).resolve()
            if path.is_relative_to(base) and path != base and path.exists():
                return path
        except (OSError, ValueError, RuntimeError):  # names that no file system takes
            continue
    return None
