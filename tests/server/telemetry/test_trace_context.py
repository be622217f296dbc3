"""server/telemetry/trace_context.py: the headers of a trace, and no others."""

from __future__ import annotations

from npucompile.server.telemetry.trace_context import MAX_HEADER_CHARS, carried


def test_only_headers_of_a_trace_are_carried():
    headers = [(b"TraceParent", b"00-a"), (b"authorization", b"x"), (b"tracestate", b"y" * (MAX_HEADER_CHARS + 1))]
    assert carried({"headers": headers}) == {"traceparent": "00-a"}
