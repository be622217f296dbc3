"""OpenTelemetry: a span for each request of the engine, with the names that vLLM gives its attributes.

The libraries are optional (`pip install npucompile[otel]`), and imported only where traces are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ...graphs.errors import SpecError
from ...runtime.request import FinishEvent, Request

SPAN = "llm_request"
SERVICE = "npucompile"

Ended = Callable[[FinishEvent | None], None]
"""Called once with how a request ended; with None where it was refused."""


class Tracing:
    """Makes spans and sends them on.

    Args:
        provider: an OpenTelemetry `TracerProvider`.
        model: name of the served one.
    """

    def __init__(self, provider: Any, model: str = "") -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise _missing(error) from None
        self._trace: Any = trace
        self._propagator: Any = TraceContextTextMapPropagator()
        self._provider = provider
        self._tracer = provider.get_tracer(SERVICE)
        self.model = model

    @staticmethod
    def to(endpoint: str) -> Tracing:
        """Sends spans to a collector by OTLP over HTTP, in the background and in batches.

        Args:
            endpoint: URL, such as http://localhost:4318/v1/traces.

        Raises:
            SpecError: the libraries are not installed, or the endpoint is no URL.
        """
        if not endpoint.startswith(("http://", "https://")):
            raise SpecError(
                f"--otlp-traces-endpoint is {endpoint!r}; legal is a URL of OTLP over HTTP, as in http://localhost:4318/v1/traces"
            )
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise _missing(error) from None
        provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return Tracing(provider)

    def begin(self, request: Request, carrier: Mapping[str, str]) -> Ended:
        """Opens the span of a request, as a child of the trace in these headers; the result closes it."""
        span = self._tracer.start_span(
            SPAN,
            context=self._propagator.extract(carrier),
            kind=self._trace.SpanKind.SERVER,
            attributes=_of_request(request, self.model),
            start_time=time.time_ns(),
        )

        def end(event: FinishEvent | None) -> None:
            failed = event is None or event.reason in ("error", "timeout")
            if event is not None:
                span.set_attributes(_of_end(event))
            if failed:
                message = "refused" if event is None else event.message or ""
                span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, message))
            span.end()

        return end

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


def _of_request(request: Request, model: str) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "gen_ai.request.id": request.id,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.usage.prompt_tokens": len(request.prompt),
    }


def _of_end(event: FinishEvent) -> dict[str, Any]:
    """Attributes of the end; times in seconds. A request that had no token has no time to its first one."""
    record = event.record
    first_s = {} if record.first_token_ms is None else {"gen_ai.latency.time_to_first_token": record.first_token_ms / 1e3}
    return {
        **first_s,
        "gen_ai.usage.completion_tokens": event.completion_tokens,
        "gen_ai.latency.time_in_queue": record.queue_ms / 1e3,
        "gen_ai.latency.e2e": record.total_ms / 1e3,
        "gen_ai.response.finish_reasons": (event.reason,),
        "npucompile.cached_tokens": record.cached_tokens,
    }


def _missing(error: ImportError) -> SpecError:
    missing = f"--otlp-traces-endpoint needs {error.name or 'opentelemetry'}"
    return SpecError(f"{missing}, which is not installed; `pip install 'npucompile[otel]'` brings it")
