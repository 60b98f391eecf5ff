"""Edits whose pictures are named in a JSON body: by URL, as data URLs, or in base64."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sglang.multimodal_gen.runtime.entrypoints.http.errors import ApiError, invalid, of_validation
from sglang.multimodal_gen.runtime.entrypoints.http.image_schemas import ImageSettings

_PICTURE = "An http(s) URL, a data URL, or base64."


class ImageReference(BaseModel):
    """A picture as OpenAI's JSON edits name it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    image_url: str = Field(description=_PICTURE)


Picture = str | ImageReference


class JsonEdit(ImageSettings):
    """The body of an edit as JSON: the settings, and the pictures by name."""

    image: Picture | list[Picture] | None = Field(None, description=_PICTURE)
    images: list[Picture] | None = Field(None, description="The same, as OpenAI calls it.")
    mask: Picture | None = Field(None, description=_PICTURE)


_OWN = ("image", "images", "mask")


def read_json_edit(body: bytes) -> tuple[ImageSettings, list[str], list[str]]:
    """The settings, and where the pictures and the mask are.

    Raises:
        ApiError: no JSON, or a field of a wrong shape.
    """
    try:
        edit = JsonEdit.model_validate_json(body)
    except ValidationError as error:
        raise ApiError(of_validation(error.errors()[0])) from error  # type: ignore[arg-type]
    if edit.image is not None and edit.images is not None:
        raise invalid("images", "images: give either image or images")
    image = edit.image if edit.images is None else edit.images
    given = image if isinstance(image, list) else [] if image is None else [image]
    sent = edit.model_dump(exclude_unset=True, exclude=set(_OWN))
    settings = ImageSettings.model_validate(sent)
    masks = [] if edit.mask is None else [edit.mask]
    return settings, list(map(_address, given)), list(map(_address, masks))


def json_edit_schema() -> dict[str, Any]:
    """The body's schema, complete in itself."""
    schema = JsonEdit.model_json_schema()
    return _inlined(schema, schema.pop("$defs", {}))


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inlined(part, definitions) for part in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(part, definitions) for name, part in node.items()}


def _address(picture: Picture) -> str:
    return picture if isinstance(picture, str) else picture.image_url
