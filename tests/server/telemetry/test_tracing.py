"""server/telemetry/tracing.py: spans as OpenTelemetry's own exporter in memory and a collector over HTTP get them."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import openai
import pytest
from support.optional import needs_module
from support.scripted import MODEL, RECORD, ScriptedEngine
from support.texts import byte_codec
from websockets.sync.client import connect

from npucompile.graphs.errors import SpecError
from npucompile.runtime.request import FinishEvent, Request
from npucompile.server.engine.service import Service
from npucompile.server.run import serving
from npucompile.server.telemetry.tracing import SPAN, Tracing

INSTALL = "pip install 'npucompile[otel]'"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def traced():
    """URL of a server, and the exporter of its spans."""
    needs_module("opentelemetry.sdk", INSTALL)
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider, engine = InMemorySpanExporter(), TracerProvider(), ScriptedEngine(fails="!")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    service = Service(engine, byte_codec(), MODEL)
    service.tracing = Tracing(provider, MODEL.name)
    with serving(service) as url:
        yield url.replace("ws", "http", 1).removesuffix("/responses"), exporter
    engine.close()


def test_a_completion_is_a_span_within_the_callers_trace(traced):
    url, exporter = traced
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=2, n=2, temperature=0.5, extra_headers=HEADERS)
    spans = exporter.get_finished_spans()
    assert len(spans) == 2
    for span in spans:
        assert (span.name, f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (SPAN, TRACE, PARENT)
        assert dict(span.attributes) == {
            "gen_ai.request.id": span.attributes["gen_ai.request.id"],
            "gen_ai.response.model": "tiny",
            "gen_ai.request.max_tokens": 2,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 1.0,
            "gen_ai.usage.prompt_tokens": 3,
            "gen_ai.usage.completion_tokens": 2,
            "gen_ai.latency.time_in_queue": RECORD.queue_ms / 1e3,
            "gen_ai.latency.time_to_first_token": RECORD.first_token_ms / 1e3,
            "gen_ai.latency.e2e": RECORD.total_ms / 1e3,
            "gen_ai.response.finish_reasons": ("length",),
            "npucompile.cached_tokens": 1,
        }
        assert span.attributes["gen_ai.request.id"].startswith(answer.id)
        assert span.status.is_ok or span.status.is_unset


def test_a_websocket_has_the_trace_of_its_handshake_in_every_lane(traced):
    url, exporter = traced
    with connect(url.replace("http", "ws") + "/responses", additional_headers=HEADERS) as socket:
        for _ in range(2):
            socket.send('{"type":"response.create","input":"a"}')
        done = 0
        while done < 2:
            done += '"response.completed"' in socket.recv(timeout=20)[:60]
    assert [f"{span.context.trace_id:032x}" for span in exporter.get_finished_spans()] == [TRACE] * 2


def test_a_failure_is_a_span_that_says_so_and_no_header_makes_a_trace_of_its_own(traced):
    url, exporter = traced
    assert httpx.post(f"{url}/completions", json={"prompt": "a!"}).status_code == 500
    assert httpx.post(f"{url}/completions", json={"prompt": "a", "logprobs": 9}).status_code == 400
    failed, refused = exporter.get_finished_spans()
    assert (failed.parent, failed.status.description) == (None, "the device is gone")
    assert refused.status.description == "refused"
    assert not failed.status.is_ok
    assert not refused.status.is_ok


def test_spans_reach_a_collector_with_the_last_of_them():
    needs_module("opentelemetry.exporter.otlp.proto.http", INSTALL)
    bodies = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tracing = Tracing.to(f"http://127.0.0.1:{server.server_port}/v1/traces")
        tracing.begin(Request("the-id", (1, 2), 3), {})(FinishEvent("the-id", "stop", 2, 1, RECORD))
        tracing.close()
        server.shutdown()
    assert b"the-id" in b"".join(bodies)


def test_without_the_libraries_it_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SpecError, match=r"needs opentelemetry.*pip install 'npucompile\[otel\]'"):
        Tracing.to("http://localhost:4318/v1/traces")
    with pytest.raises(SpecError, match="legal is a URL"):
        Tracing.to("localhost:4317")
