"""Named schemes of quantisation: which format each matrix of a published model gets."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from ...graphs.errors import SpecError
from .formats import PLAIN, Formats

SCHEMES = ("none", "w8a8", "w8a8-all", "w4a8", "w4a8-all", "w4a16")
"""`none` stores what a checkpoint has: floats, or the integers of one that is quantised. `w8a8-all` and `w4a8-all` are nobody's recipes:
they take what published ones leave float and a step reads whole, the head above all."""

ANY = "any model"


def formats_of_scheme(scheme: str, model: str) -> Formats:
    """The formats of a published model's matrices in a scheme, by the recipe that its quantised checkpoints were made with.

    Args:
        model: its preset's name (`registry.published_name`); one without a recipe of its own has that of any model.

    Raises:
        SpecError: there is no such scheme.
    """
    if scheme not in SCHEMES:
        raise SpecError(f"quantization is {scheme!r}; legal are {', '.join(SCHEMES)}")
    if scheme == "none":
        return PLAIN
    table = _table()
    name = model.lower()
    recipe = table[name] if scheme in table.get(name, ()) else table[ANY]
    rules = tuple((str(pattern), str(form)) for pattern, form in recipe[scheme])
    return Formats(rules, group=int(recipe.get("groups", {}).get(scheme, 0)))


@functools.cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    return dict(json.loads(resources.files(__package__).joinpath("recipes.json").read_text(encoding="utf-8")))
