"""The header that files of graphs for NPUs share: a msgpack map that names its format."""

from __future__ import annotations

from typing import Any

import msgpack

from ...graphs.errors import LoweringError


def fields_of(data: bytes, file_format: str) -> dict[str, Any]:
    """The fields of a file.

    Raises:
        LoweringError: the bytes are no msgpack, no map, or of another format.
    """
    try:
        fields = msgpack.unpackb(data)
    except (msgpack.UnpackException, ValueError) as error:
        raise LoweringError(f"this is not a file of format {file_format!r}: {error!r}") from None
    built_format = fields.get("format") if isinstance(fields, dict) else type(fields).__name__
    if built_format != file_format:
        raise LoweringError(f"this is not a file of format {file_format!r} but {built_format!r}; build the artifact again")
    return dict(fields)
