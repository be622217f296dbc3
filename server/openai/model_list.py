"""`/v1/models`: what is served, under each of its names."""

from __future__ import annotations

from typing import Any

from ...graphs.errors import RequestError
from ..engine.service import ServedModel
from ..requests.fields import show


def model_list(model: ServedModel) -> dict[str, Any]:
    """All names."""
    return {"object": "list", "data": [model_object(model, name) for name in (model.name, *model.aliases)]}


def one_model(model: ServedModel, name: str) -> dict[str, Any]:
    """One of them.

    Raises:
        RequestError: there is none of that name (model_not_found).
    """
    if name not in (model.name, *model.aliases):
        legal = ", ".join((model.name, *model.aliases))
        raise RequestError(f"there is no model {show(name)}; served here is {legal}", param="model", code="model_not_found")
    return model_object(model, name)


def model_object(model: ServedModel, name: str) -> dict[str, Any]:
    """An entry of OpenAI's model list, with the context length added."""
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "npucompile",
        "max_model_len": model.max_model_len,
        "artifact": model.artifact,
    }
