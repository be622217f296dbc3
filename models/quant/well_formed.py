"""Refuses a `quantization_config` whose fields are of the wrong kinds, so that its readers need not ask."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...graphs.errors import CheckpointError

_OBJECTS = ("config_groups", "sparsity_config", "transform_config", "weights", "input_activations", "output_activations")
_TEXTS = ("quant_method", "format", "fmt", "activation_scheme")
_PATTERNS = ("ignore", "targets")


def check_well_formed(where: str, config: Mapping[str, Any]) -> None:
    """Checks objects, texts and patterns of a configuration and of its groups; null is absent.

    Args:
        where: its name in errors.

    Raises:
        CheckpointError: naming the field, and what it is.
    """
    _check_fields(where, config)
    for name, group in (config.get("config_groups") or {}).items():
        place = f"{where}: config_groups"
        if not isinstance(group, Mapping):
            raise CheckpointError(f"{place}: {name} is {group!r}; expected an object")
        _check_fields(f"{place}: {name}", group)


def _check_fields(where: str, fields: Mapping[str, Any]) -> None:
    for names, kind, what in ((_OBJECTS, Mapping, "an object"), (_TEXTS, str, "a text"), (_PATTERNS, list, "a list of texts")):
        for name in names:
            value = fields.get(name)
            whole = value is None or isinstance(value, kind)
            if not whole or (kind is list and not all(isinstance(pattern, str) for pattern in value or ())):
                raise CheckpointError(f"{where}: {name} is {value!r}; expected {what}, or null")
    for name in _PATTERNS:
        for pattern in fields.get(name) or ():
            try:
                re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
            except re.error as error:
                raise CheckpointError(f"{where}: {name} has {pattern!r}, which is no regular expression: {error}") from None
