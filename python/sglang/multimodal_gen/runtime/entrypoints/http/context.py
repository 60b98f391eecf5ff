"""What the routes share: the service, the file store, the arguments."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from sglang.multimodal_gen.configs.task_type import DataType
from sglang.multimodal_gen.runtime.entrypoints.http.errors import ApiError, invalid, not_found
from sglang.multimodal_gen.runtime.managers.client_error import ClientError
from sglang.multimodal_gen.runtime.managers.file_store import FileStore
from sglang.multimodal_gen.runtime.managers.lifecycle import Lifecycle
from sglang.multimodal_gen.runtime.managers.service import GenerationService
from sglang.multimodal_gen.runtime.server_args.serving import ServingArgs

_ROUTES = {
    DataType.IMAGE: "POST /v1/images/generations",
    DataType.VIDEO: "POST /v1/videos",
}


@dataclass(frozen=True, slots=True)
class Context:
    """Made once for an app; ``files`` is None where results are not kept."""

    lifecycle: Lifecycle
    args: ServingArgs
    files: FileStore | None

    def service_for(self, model: str | None, makes: DataType | None = None) -> GenerationService:
        """The service, if it has the model that a request names, and that model ``makes`` it.

        Raises:
            Unavailable: not ready, or stopping.
            ApiError: the model is another one, or makes something else.
        """
        service = self.lifecycle.service
        if model is not None and model != service.served_name:
            raise not_found(
                f"model={model[:100]!r}: is not served here; this server has "
                f"{service.served_name!r}",
                param="model",
                code="model_not_found",
            )
        made = {task.data_type() for task in service.model.config.get_supported_task_types()}
        if makes is not None and makes not in made:
            other = next((kind for kind in _ROUTES if kind in made), None)
            remedy = "" if other is None else f"; use {_ROUTES[other]}"
            raise invalid(
                "model",
                f"model: {service.served_name!r} makes no {makes.name.lower()}s{remedy}",
                code="wrong_output",
            )
        return service

    def file_store(self) -> FileStore:
        """The file store, for replies with links.

        Raises:
            ApiError: there is none.
        """
        if self.files is None:
            message = "response_format: this server keeps no files; ask for b64_json"
            raise ApiError(ClientError(400, message, param="response_format", code="no_file_store"))
        return self.files

    def base_url(self, request: Request) -> str:
        """What a link in a reply begins with, without a slash at its end."""
        return (self.args.http.public_url or str(request.base_url)).rstrip("/")


def context_of(request: Request) -> Context:
    """The context of the app that a request came to."""
    return request.app.state.context
