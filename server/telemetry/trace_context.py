"""The trace that a request belongs to, from the headers that it came with (W3C Trace Context)."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

HEADERS = (b"traceparent", b"tracestate")
MAX_HEADER_CHARS = 512

carrier: ContextVar[Mapping[str, str]] = ContextVar("npucompile_trace_carrier", default={})  # noqa: B039
"""Headers of the request that is handled; tasks that it starts inherit them."""


def carried(scope: Mapping[str, Any]) -> dict[str, str]:
    """The headers of an ASGI request that name its trace; those that are too long are left out."""
    headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"] if name.lower() in HEADERS}
    return {name.decode(): value for name, value in headers.items() if len(value) <= MAX_HEADER_CHARS}
