"""What the endpoints share: the service, the completions that run, and how a request becomes one."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive

from ...graphs.errors import RequestError
from ...runtime.request import Request
from ..engine.choice import chosen
from ..engine.generation import Generation, GenerationOptions, Output
from ..engine.lifecycle import Lifecycle
from ..engine.service import Service
from ..fleet.routed import choice_of, is_probe
from ..guard.body_room import BodyRoom
from ..guard.door import CLIENT, OWNER
from ..guard.work import work
from ..requests.create_body import INLINE_PROMPT_CHARS
from ..requests.error_objects import Refusal, error_reply
from ..requests.fields import show
from ..requests.router_fields import HandoverFields
from ..requests.structured_output import OutputFormat
from ..response.run import ResponseRun
from .choices import UsageWanted
from .live import MAX_WAITING, Core, Live, Out
from .request_models import ChatRequest, CompletionRequest, SamplingFields
from .sse import EventStream

MAX_BODY_BYTES = 4 * 2**20
ABORT = "abort"
"""`Api.abort`, as other doors ask for it."""


class Api:
    """One server's HTTP endpoints.

    Args:
        lifecycle: of the server.
        max_body_bytes: largest legal body without pictures.

    Attributes:
        service: returns the service for a new response; raises RequestError where there is none now.
        serving: returns it for anything else.
        live: completions that run, by the owner and the id of their request.
        bodies: room for large ones.
    """

    def __init__(self, lifecycle: Lifecycle, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self.service = lifecycle.admitting
        self.serving = lifecycle.serving
        self._lifecycle, self._max_body_bytes = lifecycle, max_body_bytes
        self.bodies = BodyRoom(max_body_bytes, lifecycle.bodies)
        self.live: dict[tuple[str, str], Live[Any] | ResponseRun] = {}
        lifecycle.methods[ABORT] = self.abort

    @property
    def body_bytes(self) -> int:
        """Of the largest legal body: a server that takes pictures takes larger ones."""
        service = self._lifecycle.service
        return self._max_body_bytes + (service.picture_bytes if service else 0)

    def abort(self, owner: str, rid: str | None) -> int:
        """Ends the completions of an owner's request, or of all of its requests; of how many."""
        named = [live for (who, name), live in self.live.items() if who == owner and rid in (None, name)]
        for live in named:
            live.cancel()
        return len(named)

    async def handed_over(
        self, fields: HandoverFields, path: str, streams: bool, run: Callable[[], Awaitable[Response]], receive: Receive
    ) -> Response:
        """Answers a request that a router has sent to a prefill and a decode server, as the one that this is.

        A stream begins when its first output has come: what fails before has a status, and the router tries again.

        Raises:
            RequestError: this server has neither role, or the request cannot be served.
        """
        service = self.service()
        if service.handovers is not None:
            return await service.handovers.answer(fields, path, streams)
        if service.decoding is None:
            field = next(iter(fields.model_fields_set))
            raise Refusal("no_role", param=field, field=field)
        if is_probe(fields):
            return await run()
        choice = choice_of(fields)
        token = chosen.set(choice)
        try:
            response = await run()
            if isinstance(response, EventStream):
                await response.begun(receive)
        except Exception as error:
            reply = error_reply(error)
            service.decoding.decline(choice, reply.status, reply.message)
            raise
        finally:
            chosen.reset(token)
        return response

    def start(self, request_id: str, requests: Sequence[Request], core: Core[Out], asked: HttpRequest, *, streams: bool) -> Live[Out]:
        """Submits the engine's requests for an HTTP request, whose events `core` turns into outputs.

        Raises:
            RequestError: the engine refuses one, or its client has one of this id already; none runs then.
        """
        name = owner_of(asked), request_id
        if name in self.live:
            raise RequestError(f"rid {show(request_id)} is the id of a request that runs; legal is one that is not", param="rid")
        bound = MAX_WAITING if streams else None
        live = Live(self.service(), requests, core, lambda: self.live.pop(name, None), bound)
        live.start(client_of(asked))
        work.get().admitted()
        self.live[name] = live
        return live

    def generate(
        self, request_id: str, requests: Sequence[Request], options: GenerationOptions, asked: HttpRequest, *, streams: bool
    ) -> Live[Output]:
        """`start` for text."""
        core = Generation(requests, self.service().tokenizer, options.stop, options.skip_special_tokens)
        try:
            return self.start(request_id, requests, core, asked, streams=streams)
        except RequestError as error:
            fields = {
                "top_logprobs": options.logprobs_field,
                "prompt_logprobs": options.prompt_logprobs_field,
                "text": options.format.param if options.format else None,
                "min_tokens": options.min_tokens_field,
            }
            error.param = fields.get(error.param or "", error.param)
            raise


def client_of(request: HttpRequest) -> str:
    """Whose request it is."""
    return str(request.scope.get(CLIENT, ""))


def owner_of(request: HttpRequest) -> str:
    """Whose requests and responses it may name."""
    return str(request.scope.get(OWNER, ""))


def new_id(prefix: str) -> str:
    """An id that no other request has."""
    return f"{prefix}{uuid.uuid4().hex}"


def takes_long(prompt_chars: int, options: GenerationOptions | None = None) -> bool:
    """Whether a request is better prepared on a thread: a long prompt, or a grammar, however short."""
    return prompt_chars > INLINE_PROMPT_CHARS or (options is not None and options.format is not None)


def defaults(service: Service) -> dict[str, float]:
    """How tokens are picked where a request does not say so: as the checkpoint does, else OpenAI's way."""
    return {"temperature": 1.0, "top_p": 1.0, **service.model.defaults}


def length_of(body: CompletionRequest | ChatRequest) -> tuple[int | None, str]:
    """The most tokens of a completion, and the field that says so.

    Raises:
        RequestError: its two names say different things.
    """
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        message = f"max_tokens is {old} and max_completion_tokens is {new}; legal is one of them, or both the same"
        raise RequestError(message, param="max_completion_tokens")
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def options_of(
    body: SamplingFields, service: Service, max_tokens: int | None, logprobs: int | None, field: str, logprobs_field: str = "top_logprobs"
) -> GenerationOptions:
    """The options of a request.

    Args:
        max_tokens: of each completion, which the request's field `field` sets.
        logprobs: see GenerationOptions; `logprobs_field` sets it.

    Raises:
        RequestError: a value is not legal.
    """
    return replace(
        GenerationOptions.of(body, max_tokens, field),
        sampling=body.sampling(defaults(service)),
        stop_token_ids=frozenset(body.stop_token_ids),
        logprobs=logprobs,
        logprobs_field=logprobs_field,
        prompt_logprobs=_prompt_logprobs(body),
        skip_special_tokens=body.skip_special_tokens,
        format=_format(body),
    )


def _prompt_logprobs(body: SamplingFields) -> int | None:
    if body.prompt_logprobs is not None and body.stream:
        # As in vLLM, whose chunks have no place for them.
        message = f"prompt_logprobs is {body.prompt_logprobs} and stream is true; legal is one of them"
        raise RequestError(message, param="prompt_logprobs", code="unsupported_value")
    return body.prompt_logprobs


def _format(body: SamplingFields) -> OutputFormat | None:
    if body.response_format and body.structured_outputs:
        message = "response_format and structured_outputs are given; legal is one of them"
        raise RequestError(message, param="structured_outputs")
    return body.response_format or body.structured_outputs


def usage_wanted(body: SamplingFields) -> UsageWanted:
    """Where a stream has its usage.

    Raises:
        RequestError: there are options of a stream and no stream.
    """
    if body.stream_options is not None and not body.stream:
        raise RequestError(
            "stream_options is given, but stream is false; legal is stream_options with stream: true", param="stream_options"
        )
    if not body.stream_options or not body.stream_options.include_usage:
        return UsageWanted.NOWHERE
    return UsageWanted.EACH if body.stream_options.continuous_usage_stats else UsageWanted.LAST


def fingerprint(service: Service) -> str | None:
    """OpenAI's `system_fingerprint`: the artifact that is served."""
    return f"fp_{service.model.artifact[:16]}" if service.model.artifact else None
