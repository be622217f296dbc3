"""The served model: requests to the engine, and its events back to the event loop."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..graphs.errors import RequestError
from ..runtime.delivery import Sink
from ..runtime.request import Event, FinishEvent, Request
from .admission import Admission
from .connection import CreateCommand
from .events import ResponseInfo, completion_id
from .fields import show
from .limits import SocketLimits
from .mailbox import Mailbox
from .protocol import Conversation, ResponseCreate
from .response import PreparedResponse, Response
from .tokenizer import TextTokenizer

FIELD_OF = {"logprobs": "top_logprobs"}
"""Names in the API of request fields that have another name in the runtime."""


class EngineClient(Protocol):
    """The interface of `runtime.engine` that the server uses; its methods may be called from any thread."""

    def submit(self, request: Request, sink: Sink) -> None:
        """Queues a request; `sink` is called with its events, the FinishEvent last, on the engine's thread.

        Raises:
            RequestError: the request can never be served.
        """

    def cancel(self, *request_ids: str) -> object:
        """Ends requests early, with FinishEvents of reason "cancelled"; unknown and finished requests are ignored."""

    def stats(self) -> Mapping[str, Any]:
        """Numbers by name; `bucket_steps` maps bucket names to numbers, `backends` to backend names, and
        `spec_decode_num_accepted_tokens_per_pos` positions of draft tokens, from 0, to numbers."""


@dataclass(frozen=True)
class ServedModel:
    """The model that is served.

    Attributes:
        max_model_len: most tokens of prompt and output together.
        vocab_size: V; legal token ids are below it.
        eos_token_ids: ids that end an output.
        created_s: Unix time of the build.
        artifact: digest of the artifact, if it comes from one.
        max_running: requests that the engine can run at once; more wait.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    created_s: int = 0
    artifact: str | None = None
    max_running: int = 1


def _always_ok() -> Mapping[str, Any]:
    return {"status": "ok"}


class Service:
    """One engine with its tokenizer.

    Args:
        engine: runs the requests.
        tokenizer: of the model.
        model: the model that the engine runs.
        readiness: what the probes say; `status` is "ok" or what is wrong with the engine, the rest is detail.
        limits: of requests that wait or run.
        clock: Unix time in seconds.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: TextTokenizer,
        model: ServedModel,
        *,
        readiness: Callable[[], Mapping[str, Any]] = _always_ok,
        limits: SocketLimits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        limits = limits or SocketLimits()
        self.model = model
        self.readiness = readiness
        self.admission = Admission(model.max_running + limits.max_queue, limits.max_requests_per_client)
        self._mailbox: Mailbox | None = None
        self._engine = engine
        self._tokenizer = tokenizer
        self._clock = clock

    def prepare(self, create: CreateCommand) -> PreparedResponse:
        """Validates a message against the model and tokenizes its prompt.

        Each of `n` completions is a request of its own; they differ in id and seed (`completion_seed`).

        Raises:
            RequestError: wrong model, empty or too long prompt, ids outside the vocabulary, or a conversation.
        """
        body = create.body
        if body.model not in (None, self.model.name):
            raise RequestError(f"model is {show(body.model)}; served here is {self.model.name!r}", param="model", code="model_not_found")
        prompt = self._token_ids(body)
        request = Request(
            id=create.response_id,
            prompt=prompt,
            max_tokens=self._max_tokens(len(prompt), body.max_output_tokens),
            sampling=body.sampling,
            stop_token_ids=frozenset() if body.ignore_eos else self.model.eos_token_ids,
            logprobs=body.logprobs,
            speculative_tokens=body.speculative_tokens,
        )
        seeds = [completion_seed(body.sampling.seed, index) for index in range(body.n)]
        requests = tuple(
            replace(request, id=completion_id(request.id, index), sampling=replace(body.sampling, seed=seed))
            for index, seed in enumerate(seeds)
        )
        info = ResponseInfo(
            response_id=create.response_id,
            stream_id=create.stream_id,
            model=self.model.name,
            created_s=int(self._clock()),
            max_output_tokens=request.max_tokens,
            temperature=body.sampling.temperature,
            top_p=body.sampling.top_p,
            top_logprobs=body.logprobs or 0,
        )
        return PreparedResponse(info, requests, body.stop)

    def response(self, prepared: PreparedResponse) -> Response:
        """The response to be driven with the engine's events."""
        return Response(prepared, self._tokenizer)

    def submit(self, requests: Sequence[Request], deliver: Callable[[Event], None], client: str = "") -> None:
        """Submits requests to the engine; `deliver` is called with their events on the running loop, in order.

        Args:
            client: whose requests they are (`door.CLIENT`).

        Raises:
            RequestError: there is no room, or the engine refuses one; the others are cancelled, and `deliver` is never called.
        """
        mailbox = self._open_mailbox()
        leave = self.admission.enter(client, len(requests))

        def receive(event: Event) -> None:
            try:
                deliver(event)
            except Exception:
                # The mailbox delivers nothing of it after that.
                leave()
                raise
            if isinstance(event, FinishEvent):
                leave()

        submitted: list[str] = []
        try:
            for request in requests:
                mailbox.open(request.id, receive)
                self._engine.submit(request, mailbox)
                submitted.append(request.id)
        except Exception as error:
            for request in requests:
                mailbox.close(request.id)
            for _ in requests:
                leave()
            self.cancel(*submitted)
            if isinstance(error, RequestError):
                error.param = FIELD_OF.get(error.param or "", error.param)
            raise

    def cancel(self, *request_ids: str) -> None:
        """Asks the engine to end requests, all in one pass; ended ones are ignored."""
        if request_ids:
            self._engine.cancel(*request_ids)

    def _open_mailbox(self) -> Mailbox:
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop, self.cancel)
        return self._mailbox

    def stats(self) -> Mapping[str, Any]:
        """The engine's numbers."""
        return self._engine.stats()

    def _token_ids(self, body: ResponseCreate) -> tuple[int, ...]:
        prompt = body.prompt
        if isinstance(prompt, Conversation):
            raise RequestError(
                f"input is a list of {len(prompt.messages)} messages, but chat templates are not supported by model {self.model.name!r}; "
                "legal are text in input, or input_token_ids",
                param="input",
                code="chat_template_missing",
            )
        limit = self.model.max_model_len
        param = "input" if isinstance(prompt, str) else "input_token_ids"
        # Known before any token is looked at, which would take seconds for a text of megabytes.
        least = self._tokenizer.fewest_tokens(prompt) if isinstance(prompt, str) else len(prompt)
        if least >= limit:
            count = f"{len(prompt)} characters, which are at least {least} tokens," if isinstance(prompt, str) else f"{least} tokens"
            message = f"{param} has {count} and needs room for 1 more; the context of {self.model.name!r} is {limit} tokens"
            raise RequestError(message, param=param, code="context_length_exceeded")
        if isinstance(prompt, str):
            prompt = self._tokenizer.encode(prompt)
        if not prompt:
            raise RequestError(f"{param} holds no tokens; legal is a prompt of at least 1", param=param, code="empty_prompt")
        illegal = next((token for token in prompt if not 0 <= token < self.model.vocab_size), None)
        if illegal is not None:
            message = f"token id {illegal} in {param}; legal are 0 to {self.model.vocab_size - 1}"
            raise RequestError(message, param=param, code="token_out_of_range")
        return prompt

    def _max_tokens(self, prompt_tokens: int, max_output_tokens: int | None) -> int:
        limit = self.model.max_model_len
        room = limit - prompt_tokens
        if room < 1:
            message = f"input has {prompt_tokens} tokens and needs room for 1 more; the context of {self.model.name!r} is {limit} tokens"
            raise RequestError(message, param="input", code="context_length_exceeded")
        if max_output_tokens is not None and max_output_tokens > room:
            message = f"input has {prompt_tokens} tokens and max_output_tokens is {max_output_tokens}; together at most {limit} are legal"
            raise RequestError(message, param="max_output_tokens", code="context_length_exceeded")
        return room if max_output_tokens is None else max_output_tokens


def completion_seed(seed: int | None, index: int) -> int | None:
    """The seed of completion `index` of a response with `seed`.

    Completion 0 has the response's seed, so it equals a response with one completion. Completion i has the first 63 bits of the SHA-256
    of the text "<seed>/<i>", so that it can be reproduced alone. Without a seed the engine draws one for each completion.
    """
    if seed is None or index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "big") >> 1
