"""The HTTP endpoints that say how the server is: liveness and readiness, metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from .door import error_response
from .errors import RETRY_AFTER_S, ErrorReply, error_reply
from .lifecycle import Lifecycle
from .service import ServedModel

METRIC_PREFIX = "npucompile:"
"""The names behind the prefix mean what vLLM's `vllm:` ones mean, so its dashboards port by replacing it."""

HELP: Mapping[str, str] = {
    "num_requests_running": "Requests with pages and state slots.",
    "num_requests_waiting": "Requests that wait for pages or slots.",
    "kv_cache_usage_perc": "Share of KV pages in use, 1 is all.",
    "prompt_tokens_total": "Prompt tokens prefilled.",
    "generation_tokens_total": "Tokens generated.",
    "preemptions_total": "Times a request lost its pages and was prefilled again.",
    "padded_rows_total": "Rows of padding computed.",
    "discarded_rows_total": "Rows computed for requests that had ended by then.",
    "compiles_after_ready_total": "Traces or compiles in the serving process after ready; anything but 0 is a bug.",
    "requests_total": "Requests finished.",
    "requests_finished_total": "Requests finished per reason.",
    "steps_total": "Steps run.",
    "degraded_steps_total": "Steps of a bucket that cannot run, which ran in another one.",
    "steps_failed_total": "Steps that failed, with their requests.",
    "spec_decode_num_drafts_total": "Times that drafts of a request were verified.",
    "spec_decode_num_draft_tokens_total": "Draft tokens verified.",
    "spec_decode_num_accepted_tokens_total": "Draft tokens accepted.",
    "spec_decode_num_accepted_tokens_per_pos_total": "Draft tokens accepted per place among the drafts of a step, from 0.",
    "bucket_steps_total": "Steps run per bucket.",
    "bucket_info": "What runs each bucket; always 1.",
    "websocket_connections": "Sockets open.",
    "draining": "1 while the server ends and takes no new requests.",
    "requests_not_finite_total": "Requests that failed because the model returned what is no number.",
    "artifact_info": "The model and artifact being served; always 1.",
}

FINISHED = "requests_finished_"
"""Prefix of the engine's numbers per finish reason, which become one metric with a label."""

ACCEPTED = "spec_decode_num_accepted_tokens_per_pos"
"""The engine's accepted tokens by draft position; a counter with a label, as in vLLM."""

Sample = tuple[dict[str, str], float]


def routes(lifecycle: Lifecycle, connections: Callable[[], int]) -> list[Route]:
    """The HTTP routes; `connections` counts open sockets."""

    async def health(_: Request) -> Response:
        return JSONResponse(dict(lifecycle.state()), status_code=200 if lifecycle.alive() else 503)

    async def ready(_: Request) -> Response:
        if lifecycle.ready():
            return JSONResponse(dict(lifecycle.state()))
        return JSONResponse(dict(lifecycle.state()), status_code=503, headers={"Retry-After": str(RETRY_AFTER_S[503])})

    async def metrics(_: Request) -> Response:
        service = lifecycle.serving()
        stats = {**service.stats(), "websocket_connections": connections(), "draining": int(lifecycle.draining)}
        return PlainTextResponse(render_metrics(stats, service.model), media_type="text/plain; version=0.0.4")

    paths = {"/health": health, "/ready": ready, "/metrics": metrics}
    return [Route(path, endpoint) for path, endpoint in paths.items()]


async def http_error(_: Request, error: Exception) -> Response:
    """Errors in OpenAI's format: those of requests, the router's own (404, 405), and the server's (500)."""
    if isinstance(error, HTTPException):
        response = error_response(ErrorReply(error.status_code, error.detail))
        response.headers.update(error.headers or {})
        return response
    return error_response(error_reply(error))


def render_metrics(stats: Mapping[str, Any], model: ServedModel) -> str:
    """Engine numbers as Prometheus text; names that end in `_total` are counters, the others gauges."""
    metrics: dict[str, list[Sample]] = {}
    for name, value in stats.items():
        if name in ("bucket_steps", "degraded_steps"):
            metrics[f"{name}_total"] = [({"bucket": bucket}, steps) for bucket, steps in sorted(value.items())]
        elif name == ACCEPTED:
            metrics[f"{ACCEPTED}_total"] = [({"position": position}, value[position]) for position in sorted(value, key=int)]
        elif name == "backends":
            metrics["bucket_info"] = [({"bucket": bucket, "backend": backend}, 1) for bucket, backend in sorted(value.items())]
        elif name.startswith(FINISHED):
            metrics.setdefault(f"{FINISHED}total", []).append(({"reason": name.removeprefix(FINISHED)}, value))
        else:
            metrics[name] = [({}, value)]
    metrics["artifact_info"] = [({"model": model.name, "artifact": model.artifact or ""}, 1)]
    return "".join(f"{line}\n" for name, samples in metrics.items() for line in _metric(name, samples))


def _metric(name: str, samples: list[Sample]) -> list[str]:
    full = METRIC_PREFIX + name
    kind = "counter" if name.endswith("_total") else "gauge"
    head = [f"# HELP {full} {HELP[name]}"] if name in HELP else []
    return [*head, f"# TYPE {full} {kind}", *(f"{full}{_labels(labels)} {value}" for labels, value in samples)]


def _labels(labels: Mapping[str, str]) -> str:
    escaped = {name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, value in labels.items()}
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}" if labels else ""
