"""What a client asks for, and how that is written down so that it can be run again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang.multimodal_gen.configs.task_type import DataType
from sglang.multimodal_gen.runtime.managers.client_error import PATH_SETTINGS
from sglang.multimodal_gen.runtime.managers.jobs import IdempotencyKey, JobRecord
from sglang.multimodal_gen.runtime.utils.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkOrder:
    """What a client asks for: sampling settings by name, and how they are to be served.

    ``keep`` is the format in which the outputs are put into the file store before the job counts
    as completed (None: they are the caller's alone), ``keep_quality`` that of JPEG and WebP.
    ``durable`` work goes on without its caller, and after a restart of the server; a ``webhook``
    is told of its end. ``key`` is the client's own name for it.
    """

    kind: str
    settings: Mapping[str, Any]
    data_type: DataType
    priority: int = 0
    timeout: float | None = None
    previews: int = 0
    keep: str | None = None
    keep_quality: int | None = None
    durable: bool = False
    webhook: str | None = None
    key: IdempotencyKey | None = None
    warnings: Sequence[str] = field(default=())
    """What the door has to say about the request; told with the job's own."""


def rerun_of(order: WorkOrder, seeds: Sequence[int]) -> dict[str, Any]:
    """What runs an order again, as JSON; with the seeds that were drawn for it.

    Raises:
        InvalidRequest: a setting that JSON cannot carry.
    """
    settings = {k: v for k, v in order.settings.items() if k not in PATH_SETTINGS}
    for name, value in settings.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(name, value, "must be text, numbers or lists") from error
    return {
        "settings": settings | {"seed": list(seeds)},
        "data_type": order.data_type.name,
        "keep": order.keep,
        "keep_quality": order.keep_quality,
        "warnings": list(order.warnings),
    }


def order_of(record: JobRecord, inputs: Mapping[str, Sequence[str]]) -> WorkOrder:
    """The order that a record was made of; ``inputs`` are the paths of its input files by field."""
    rerun = record.rerun
    assert rerun is not None, "work that ends with its caller is not run again"
    settings = dict(rerun["settings"])
    for name, paths in inputs.items():
        settings[name] = paths[0] if len(paths) == 1 else list(paths)
    return WorkOrder(
        kind=record.kind,
        settings=settings,
        data_type=DataType[rerun["data_type"]],
        priority=record.priority,
        keep=rerun["keep"],
        keep_quality=rerun["keep_quality"],
        durable=True,
        webhook=record.webhook,
        warnings=tuple(rerun["warnings"]),
    )
