"""The served model: requests to the engine, and its events back to the event loop."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from starlette.responses import Response
from starlette.websockets import WebSocket

from ...graphs.errors import RequestError
from ...runtime.bitmasks import check_first
from ...runtime.delivery import Sink
from ...runtime.picture_spans import PictureInput
from ...runtime.request import Event, FinishEvent, Request, Sampling
from ..chat.format import ChatFormat
from ..grammar.compiler import GrammarCompiler, GrammarConstraint
from ..guard.admission import Admission
from ..guard.door import has_key
from ..guard.limits import SocketLimits
from ..pictures.reader import PictureReader
from ..requests.error_objects import Refusal
from ..requests.fields import show
from ..requests.left_out import LeftOutCounter
from ..requests.router_fields import HandoverFields
from ..requests.structured_output import OutputFormat
from ..siblings.ids import new_response_id
from ..siblings.link import Link
from ..siblings.siblings import Siblings
from ..storage.store import ResponseStore
from ..telemetry.trace_context import carrier
from ..telemetry.tracing import Tracing
from ..text.tokenizer import TextTokenizer
from .choice import RouterChoice
from .generation import GenerationOptions, completion_id, completion_seed
from .mailbox import Mailbox

FIELD_OF = {"logprobs": "top_logprobs", "constraint": "text"}
"""Names in the API of request fields that have another name in the runtime."""

TEXT_ALONE = (
    "its artifact has no encode buckets; legal is text, or a server of an artifact that `npucompile build --encode LIST` made of a "
    "checkpoint with a vision tower"
)


class EngineClient(Protocol):
    """The interface of `runtime.engine` that the server uses; its methods may be called from any thread."""

    def submit(self, request: Request, sink: Sink) -> None:
        """Queues a request; `sink` is called with its events, the FinishEvent last, on the engine's thread.

        Raises:
            RequestError: the request can never be served.
        """

    def hold(self) -> None:
        """Requests that are submitted until `release` begin together, where nothing runs."""

    def release(self) -> None:
        """See `hold`."""

    def cancel(self, *request_ids: str) -> object:
        """Ends requests early, with FinishEvents of reason "cancelled"; unknown and finished requests are ignored."""

    def flush_prefix_cache(self) -> bool:
        """Forgets all prefixes before the next step; returns whether any are kept."""

    def stats(self) -> Mapping[str, Any]:
        """Numbers by name; `bucket_steps` maps bucket names to numbers, `backends` to backend names, and
        `spec_decode_num_accepted_tokens_per_pos` positions of draft tokens, from 0, to numbers."""


class HandoverHub(Protocol):
    """The interface of `fleet.prefill_hub` that the server uses."""

    async def serve(self, websocket: WebSocket, enter: Callable[[int], Callable[[], None]]) -> None:
        """Serves the connection of a decode server to its end.

        Args:
            enter: takes a place for a prompt of so many tokens, and returns what gives it back; raises RequestError where there is none.
        """

    async def answer(self, fields: HandoverFields, path: str, streams: bool) -> Response:
        """Answers a router that has sent a request to this server and to a decode server."""

    def stats(self) -> Mapping[str, Any]:
        """Numbers by name."""


class Decoding(Protocol):
    """The interface of `fleet.decode_engine` that the server uses beside that of an engine."""

    def decline(self, choice: RouterChoice, status: int, reason: str) -> None:
        """Tells the prefill server of a router's choice that its requests are not asked for."""


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
        max_total_tokens: that the pages of all groups hold.
        tp, dp: devices of a group, and groups.
        num_experts: whose choices are counted; 0 where they are not.
        aliases: further names that requests may have for it.
        defaults: sampling parameters of HTTP requests that do not set them, where they are not OpenAI's.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    created_s: int = 0
    artifact: str | None = None
    max_running: int = 1
    max_total_tokens: int = 0
    tp: int = 1
    dp: int = 1
    num_experts: int = 0
    aliases: tuple[str, ...] = ()
    defaults: Mapping[str, float] = field(default_factory=dict)


def _always_ok() -> Mapping[str, Any]:
    return {"status": "ok"}


class Service:
    """One engine with its tokenizer.

    Args:
        engine: runs the requests.
        tokenizer: of the model.
        model: the model that the engine runs.
        chat: how it converses.
        readiness: what the probes say; `status` is "ok" or what is wrong with the engine, the rest is detail.
        limits: of requests: how many wait or run, how urgent they are, and how long they take.
        clock: Unix time in seconds.
        pictures: reads those of requests; None takes text alone.

    Attributes:
        without_pictures: why that is so, and what would take pictures.
        left_out: counts what requests have and no prompt can have.
        tracing: makes a span for each request; None for none.
        handovers: what decode servers connect to, on a prefill server; it answers no requests of its own.
        decoding: the engine of a decode server, for what routers choose.
        ending: the server cuts what still runs, which its clients are told.
        siblings: the other doors of the server; None where there are none.
        tenant_key: by which clients become tenants; doors of one server share it.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: TextTokenizer,
        model: ServedModel,
        *,
        chat: ChatFormat | None = None,
        readiness: Callable[[], Mapping[str, Any]] = _always_ok,
        limits: SocketLimits | None = None,
        clock: Callable[[], float] = time.time,
        pictures: PictureReader | None = None,
    ) -> None:
        self.limits = limits = limits or SocketLimits()
        self.store = ResponseStore(limits.max_stored_bytes, limits.stored_s)
        self.left_out = LeftOutCounter(limits.strict_fields)
        self.model = model
        self.tokenizer = tokenizer
        self.chat = chat or ChatFormat()
        self.readiness = readiness
        self.pictures, self.without_pictures = pictures, TEXT_ALONE
        tokens = limits.max_queued_tokens, limits.max_tokens_per_client
        self.admission = Admission(model.max_running + limits.max_queue, limits.max_requests_per_client, *tokens)
        # Tenants are told apart without saying who they are, which journals would keep.
        self.tenant_key = secrets.token_bytes(16)
        self.siblings: Siblings | None = None
        self.tracing: Tracing | None = None
        self.handovers: HandoverHub | None = None
        self.decoding: Decoding | None = None
        self.ending = False
        self._mailbox: Mailbox | None = None
        self._holding = False
        self._engine = engine
        self._clock = clock

    @property
    def picture_bytes(self) -> int:
        """What pictures add to the largest message of a client."""
        return self.pictures.body_bytes if self.pictures else 0

    @property
    def busy(self) -> bool:
        """Whether anybody waits for a response."""
        return bool(self.admission.live or (self.siblings and self.siblings.following))

    def new_response_id(self) -> str:
        """An identifier no other response has."""
        return self.siblings.new_response_id() if self.siblings else new_response_id()

    def keeper(self, response_id: str) -> Link | None:
        """The other door that keeps a response; None for what this one keeps, or nobody."""
        return self.siblings.keeper(response_id) if self.siblings else None

    def check_model(self, name: str | None) -> None:
        """Raises RequestError when a request names another model than the one that is served."""
        if name not in (None, self.model.name, *self.model.aliases):
            served = " or ".join(map(repr, (self.model.name, *self.model.aliases)))
            raise Refusal("model_not_found", param="model", name=show(name), names=served)

    def encode(self, text: str, param: str, *, add_special: bool = True) -> tuple[int, ...]:
        """Token ids of a prompt; `param` is its field, for errors. May take long, and may be called on any thread.

        Raises:
            RequestError: the prompt cannot be served.
        """
        return self.checked(self.encode_pieces([text], 0, param, add_special=add_special)[0], param)

    def encode_pieces(self, pieces: Sequence[str], places: int, param: str, *, add_special: bool) -> list[tuple[int, ...]]:
        """Token ids of each piece of a prompt that has so many places of pictures besides; what the tokenizer adds is of the first.

        Raises:
            RequestError: they are too many.
        """
        # Known before any token is looked at, which would take seconds for a text of megabytes.
        least = sum(map(self.tokenizer.fewest_tokens, pieces)) + places
        if least >= self.model.max_model_len:
            raise self.too_long(f"{sum(map(len, pieces))} characters, which are at least {least} tokens,", param)
        return [self.tokenizer.encode(piece, add_special=add_special and not index) for index, piece in enumerate(pieces)]

    def checked(self, prompt: tuple[int, ...], param: str) -> tuple[int, ...]:
        """The prompt itself.

        Raises:
            RequestError: it is empty, too long, or holds ids outside the vocabulary.
        """
        if len(prompt) >= self.model.max_model_len:
            raise self.too_long(f"{len(prompt)} tokens", param)
        if not prompt:
            raise RequestError(f"{param} holds no tokens; legal is a prompt of at least 1", param=param, code="empty_prompt")
        illegal = next((token for token in prompt if not 0 <= token < self.model.vocab_size), None)
        if illegal is not None:
            message = f"token id {illegal} in {param}; legal are 0 to {self.model.vocab_size - 1}"
            raise RequestError(message, param=param, code="token_out_of_range")
        return prompt

    def requests(
        self, base_id: str, prompt: tuple[int, ...], options: GenerationOptions, param: str, pictures: tuple[PictureInput, ...] = ()
    ) -> tuple[Request, ...]:
        """Engine requests for the completions of a prompt; they differ in id (`completion_id`) and seed (`completion_seed`).

        A large grammar takes up to a second, so that this may be called on any thread.

        Args:
            param: the prompt's field, for errors.
            pictures: in the prompt.

        Raises:
            RequestError: prompt and output do not fit into the context, what the output must be is no grammar, the request is more
                urgent than it may be or wants more time, or the prompt ends in a picture, or is scored from before its last one.
        """
        _check_places(prompt, pictures, options, param)
        self.limits.check_priority(options.priority)
        first_token_s = self.limits.first_token_timeout_s
        sampling = self._sampling(options)
        constraint = None if options.format is None else self._constraint(options.format)
        # A form that is complete allows nothing but the end.
        stops = frozenset() if options.ignore_eos and options.format is None else self.model.eos_token_ids
        first = Request(
            id=base_id,
            prompt=prompt,
            max_tokens=self._max_tokens(len(prompt), param, options),
            sampling=sampling,
            stop_token_ids=stops | options.stop_token_ids,
            logprobs=options.logprobs,
            prompt_logprobs=options.prompt_logprobs,
            prompt_logprobs_from=options.prompt_logprobs_from,
            speculative_tokens=options.speculative_tokens,
            constraint=constraint,
            priority=options.priority,
            timeout_ms=self.limits.timeout_ms(options.timeout_ms),
            first_token_timeout_ms=None if first_token_s is None else 1e3 * first_token_s,
            cache_salt=options.cache_salt,
            skip_reading_prefix_cache=options.skip_reading_prefix_cache,
            pictures=pictures,
        )
        check_first(first, self.model.vocab_size)
        others = (
            replace(
                first,
                id=completion_id(base_id, index),
                sampling=replace(sampling, seed=completion_seed(sampling.seed, index)),
                # Each follows its own output.
                constraint=None if constraint is None else constraint.copy(),
            )
            for index in range(1, options.n)
        )
        return (first, *others)

    def _sampling(self, options: GenerationOptions) -> Sampling:
        words = [ids for text in options.bad_words for ids in self.tokenizer.spellings(text)]
        return replace(options.sampling, bad_words=tuple(words)) if words else options.sampling

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer.library, self.model.eos_token_ids)

    def _constraint(self, form: OutputFormat) -> GrammarConstraint:
        return self._grammars.constraint(form.kind, form.value, form.param)

    def now_s(self) -> int:
        """Unix time."""
        return int(self._clock())

    def submit(self, requests: Sequence[Request], deliver: Callable[[Event], None], client: str = "") -> None:
        """Submits requests to the engine; `deliver` is called with their events on the running loop, in order.

        Args:
            client: whose requests they are (`door.CLIENT`); those with another key share no prefixes with them.

        Raises:
            RequestError: there is no room, or the engine refuses one; the others are cancelled, and `deliver` is never called.
        """
        if self.handovers is not None:
            raise Refusal("prefill_role")
        mailbox = self._open_mailbox()
        leave = self.admission.enter(client, len(requests), sum(len(request.prompt) for request in requests))
        tenant = self._tenant(client)
        spans = {request.id: self.tracing.begin(request, carrier.get()) for request in requests} if self.tracing else {}

        def ended(event: FinishEvent | None) -> None:
            if event and self.ending and event.reason == "cancelled":
                cut = Refusal("draining.cut")
                event = replace(event, reason="error", message=str(cut), code=cut.code)
            try:
                if event:
                    deliver(event)
            finally:
                leave()
            if event and (close := spans.get(event.request_id)):
                close(event)

        submitted = list[str]()
        self._hold(mailbox.loop)
        try:
            for request in requests:
                mailbox.open(request.id, deliver, ended)
                if client:
                    salt = f"{tenant} {request.cache_salt}" if has_key(client) else request.cache_salt
                    request = replace(request, tenant=tenant, cache_salt=salt)
                self._engine.submit(request, mailbox)
                submitted.append(request.id)
        except Exception as error:
            for request in requests:
                mailbox.close(request.id)
            for _ in requests:
                leave()
            for close in spans.values():
                close(None)
            self.cancel(*submitted)
            if isinstance(error, RequestError):
                error.param = FIELD_OF.get(error.param or "", error.param)
            raise

    def _hold(self, loop: asyncio.AbstractEventLoop) -> None:
        """What is submitted in this turn of the loop begins together: a client's frames come together."""
        if not self._holding:
            self._holding = True
            self._engine.hold()
            loop.call_soon(self._release)

    def _release(self) -> None:
        self._holding = False
        self._engine.release()

    def cancel(self, *request_ids: str) -> None:
        """Asks the engine to end requests, all in one pass; ended ones are ignored."""
        if request_ids:
            self._engine.cancel(*request_ids)

    def _tenant(self, client: str) -> str:
        """A client's name in the engine."""
        return hashlib.blake2b(client.encode(), key=self.tenant_key, digest_size=8).hexdigest() if client else ""

    def flush_prefix_cache(self) -> bool:
        """Forgets what is in the engine's caches of earlier requests; returns whether anything is kept there at all."""
        return self._engine.flush_prefix_cache()

    def soon(self, call: Callable[[], None]) -> None:
        """See `Mailbox.soon`."""
        self._open_mailbox().soon(call)

    def _open_mailbox(self) -> Mailbox:
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop, self.cancel)
        return self._mailbox

    def stats(self) -> Mapping[str, Any]:
        """The engine's numbers, and `own_stats`."""
        return {**self._engine.stats(), **self.own_stats()}

    def own_stats(self) -> Mapping[str, Any]:
        """Numbers of this process: of handovers, pictures and what was left out."""
        others = [each.stats() for each in (self.handovers, self.pictures) if each]
        own = {"request_parts_left_out_total": self.left_out.total}
        return {**own, **{name: value for each in others for name, value in each.items()}}

    def _max_tokens(self, prompt_tokens: int, param: str, options: GenerationOptions) -> int:
        limit, wanted, name = self.model.max_model_len, options.max_tokens, options.max_tokens_field
        room = limit - prompt_tokens
        if wanted is not None and wanted > room:
            message = f"{param} has {prompt_tokens} tokens and {name} is {wanted}; together at most {limit} are legal"
            raise RequestError(message, param=name, code="context_length_exceeded")
        return room if wanted is None else wanted

    def too_long(self, what: str, param: str) -> RequestError:
        """The error of a prompt that does not fit into the context."""
        message = f"{param} has {what} and needs room for 1 more; the context of {self.model.name!r} is {self.model.max_model_len} tokens"
        return RequestError(message, param=param, code="context_length_exceeded")


def _check_places(prompt: tuple[int, ...], pictures: Sequence[PictureInput], options: GenerationOptions, param: str) -> None:
    end = pictures[-1].span.end if pictures else 0
    if end and end == len(prompt):
        raise RequestError(f"{param} ends in a picture; legal is a prompt whose last token is text", param=param, code="invalid_image")
    if end and options.prompt_logprobs is not None and options.prompt_logprobs_from <= end:
        field = options.prompt_logprobs_field
        message = f"{field} asks for position {options.prompt_logprobs_from}; legal are positions behind the pictures, from {end + 1}"
        raise RequestError(message, param=field, code="unsupported_value")
