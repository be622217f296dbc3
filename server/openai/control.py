"""What operators, bench tools and clients ask of a server beside completions."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ... import __version__
from ...graphs.errors import RequestError
from ...runtime.metrics import EXPERTS
from ..engine.generation import GenerationOptions
from ..engine.output_stream import CompletionEnd
from ..engine.service import ServedModel
from ..requests.bodies import Body
from ..requests.error_objects import Refusal
from ..requests.fields import show
from .api import ABORT, Api, new_id, owner_of
from .sse import whole

PROBE_TIMEOUT_S = 20.0
"""SGLang's."""

HISTOGRAMS = "histograms"
"""The engine's numbers that are for `/metrics` alone: JSON has no infinity, where each histogram ends."""

ACCEPTED, DRAFTS = "spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total"


class AbortRequest(Body):
    """`/abort_request`."""

    rid: str | None = None
    abort_all: bool = False


async def abort_request(api: Api, body: AbortRequest, request: Request) -> Response:
    """Ends the completions of one request, by the id in its answer or the `rid` that it gave, or of all; unknown ids are ignored. With keys
    those of the same key alone.

    Raises:
        RequestError: it names none.
    """
    if body.rid is None and not body.abort_all:
        raise RequestError("rid is missing; legal is the id of a request, or abort_all: true", param="rid")
    arguments = owner_of(request), None if body.abort_all else body.rid
    siblings = api.serving().siblings
    elsewhere = await siblings.ask_all(ABORT, *arguments) if siblings else []
    return JSONResponse({"aborted": api.abort(*arguments) + sum(elsewhere)})


async def ping(_: Api, __: Request) -> Response:
    """Answers."""
    return PlainTextResponse("")


async def version(_: Api, __: Request) -> Response:
    """Which npucompile this is."""
    return JSONResponse({"version": __version__})


async def flush_cache(api: Api, _: Request) -> Response:
    """Forgets all prefixes; bench tools ask before each run. Running requests go on, and leave nothing behind."""
    keeps_prefixes = api.service().flush_prefix_cache()
    return PlainTextResponse("the prefix cache is flushed\n" if keeps_prefixes else "no prefix cache is kept; there was nothing to flush\n")


async def expert_counts(api: Api, _: Request) -> Response:
    """How often each expert of each layer was chosen since the engine began, as SGLang's recorder writes it.

    Raises:
        Refusal: nothing is counted.
    """
    service = api.service()
    if not (experts := service.model.num_experts):
        raise Refusal("no_expert_counts")
    counts = service.stats().get(EXPERTS, np.zeros((0, experts), np.int64))
    return JSONResponse({"logical_count": np.pad(counts, ((0, 0), (0, experts - counts.shape[1]))).tolist()})


async def model_info(api: Api, _: Request) -> Response:
    """What is served, as SGLang tells it."""
    model = api.serving().model
    return JSONResponse({"model_path": model.name, "tokenizer_path": model.name, "is_generation": True, "weight_version": model.artifact})


async def get_load(api: Api, _: Request) -> Response:
    """What waits and runs in each dp group, as SGLang tells it; the first one has what is in none yet. `num_tokens` are of prompts."""
    service = api.serving()
    stats = service.stats()
    running, waiting, tokens = (dict(stats[name]) for name in ("dp_requests_running", "dp_requests_waiting", "dp_prompt_tokens"))
    waiting[0] += max(0, stats["num_requests_waiting"] - sum(waiting.values()))
    tokens[0] += max(0, service.admission.live_tokens - sum(tokens.values()))
    return JSONResponse(
        [
            {"dp_rank": rank, "num_reqs": running[rank] + waiting[rank], "num_waiting_reqs": waiting[rank], "num_tokens": tokens[rank]}
            for rank in running
        ]
    )


async def server_info(api: Api, _: Request) -> Response:
    """What is served and how, with the engine's numbers; `internal_states` has what SGLang's benchmark looks for."""
    service = api.serving()
    model, chat, stats = service.model, service.chat, service.stats()
    drafts = stats.get(DRAFTS, 0)
    info: dict[str, Any] = {
        "version": __version__,
        "model_path": model.name,
        "tokenizer_path": model.name,
        "served_model_name": model.name,
        "served_model_names": [model.name, *model.aliases],
        "max_model_len": model.max_model_len,
        "context_length": model.max_model_len,
        "max_total_tokens": model.max_total_tokens,
        "max_running_requests": model.max_running,
        "tp_size": model.tp,
        "dp_size": model.dp,
        "pp_size": 1,
        "load_balance_method": "auto",
        "disaggregation_mode": "prefill" if service.handovers else "decode" if service.decoding else "null",
        "weight_version": model.artifact,
        "vocab_size": model.vocab_size,
        "artifact": model.artifact,
        "default_sampling": dict(model.defaults),
        "has_chat_template": chat.template is not None,
        "reasoning_parser": chat.reasoning,
        "tool_call_parser": chat.tool_calls,
        "stats": {name: value for name, value in stats.items() if name not in (HISTOGRAMS, EXPERTS)},
        "internal_states": [{"avg_spec_accept_length": 1 + stats[ACCEPTED] / drafts} if drafts else {}],
    }
    return JSONResponse(info)


async def health_generate(api: Api, request: Request) -> Response:
    """Whether a token can be generated, end to end: 200 or 503."""
    service = api.service()
    base, options = new_id("probe-"), GenerationOptions(max_tokens=1, ignore_eos=True)
    live = api.generate(base, service.requests(base, (0,), options, "prompt"), options, request, streams=False)
    try:
        outputs = await asyncio.wait_for(whole(live, request.receive), PROBE_TIMEOUT_S)
    except TimeoutError:
        raise RequestError(f"no token was generated within {PROBE_TIMEOUT_S:g} s", code="not_ready") from None
    (end,) = (output for _, output in outputs if isinstance(output, CompletionEnd))
    if end.reason not in ("stop", "length"):
        raise RequestError(f"the probe ended with reason {end.reason!r}: {end.message}", code="not_ready")
    return JSONResponse({"status": "ok"})


def model_list(model: ServedModel) -> dict[str, Any]:
    """`/v1/models`: what is served, under each of its names."""
    return {"object": "list", "data": [model_object(model, name) for name in (model.name, *model.aliases)]}


def one_model(model: ServedModel, name: str) -> dict[str, Any]:
    """One of them.

    Raises:
        RequestError: there is none of that name (model_not_found).
    """
    if name not in (model.name, *model.aliases):
        names = ", ".join((model.name, *model.aliases))
        raise Refusal("model_not_found.listed", param="model", name=show(name), names=names)
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
