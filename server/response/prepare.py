"""The body of a response becomes requests of the engine, checked against the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...graphs.errors import RequestError
from ...runtime.request import Request
from ..chat.reply_grammar import check_choice
from ..chat.template import Chat
from ..engine.generation import GenerationOptions
from ..engine.prompts import rendered, with_pictures
from ..engine.service import Service
from ..parsers.message import MessageParser
from ..pictures.processor import Picture
from ..pictures.videos import Video
from ..requests.create_body import Conversation, ResponseCreate
from ..requests.structured_output import OutputFormat
from ..requests.tool_fields import AUTO
from .events import ResponseInfo
from .kept import conversation
from .progress import PreparedResponse
from .run import Keeping


@dataclass(frozen=True)
class Owners:
    """Who asks for a response.

    Attributes:
        key: owner of what is stored for all connections (`door.OWNER`).
        socket: owner of what one websocket remembers; None over HTTP, which remembers nothing by itself.
    """

    key: str
    socket: str | None = None

    @property
    def all(self) -> Collection[str]:
        """Those whose responses may be named."""
        return (self.key,) if self.socket is None else (self.key, self.socket)


async def continued(service: Service, body: ResponseCreate, owners: Owners) -> ResponseCreate:
    """The body behind the conversation that it continues; on the event loop.

    Raises:
        RequestError: that conversation is not known.
    """
    if body.fields.previous_response_id is None:
        return body
    return body.after(await conversation(service, body.fields.previous_response_id, owners.all))


def keeping(service: Service, body: ResponseCreate, owners: Owners) -> Keeping:
    """What is kept of a response.

    Raises:
        RequestError: it asks for more than this server keeps.
    """
    keeps = service.store.keeps
    if body.fields.store and not keeps:
        raise RequestError("store is true, and this server keeps no responses; legal is false", param="store", code="unsupported_value")
    if not keeps and (body.fields.background or body.fields.resumable):
        name = "background" if body.fields.background else "resumable"
        message = f"{name} is true, and this server keeps no events of responses; legal is false"
        raise RequestError(message, param=name, code="unsupported_value")
    if not keeps:
        return Keeping()
    whole = body.fields.store is not False
    if body.fields.background and not whole:
        raise RequestError("background is true and store is false; legal is background with store", param="background")
    owner = owners.key if whole or body.fields.resumable else owners.socket
    return Keeping(owner, whole, body.fields.resumable, body.fields.background)


def prepare(
    service: Service, body: ResponseCreate, response_id: str, stream_id: str = "", pictures: Sequence[Picture | Video] = ()
) -> PreparedResponse:
    """Validates a body against the model and tokenizes its prompt; on any thread.

    Args:
        pictures: of the body, read.
        stream_id: lane of the socket that its events name; "" for none.

    Raises:
        RequestError: wrong model, empty or too long prompt, ids outside the vocabulary, or a conversation without a chat template.
    """
    service.check_model(body.fields.model)
    check_choice(body.use, service.chat.tool_calls)
    prompt = _prompt(service, body, pictures) if body.fields.generate else _prefix(service, body, pictures)
    requests: tuple[Request, ...] = ()
    if prompt is not None:
        places = with_pictures(service, prompt.token_ids, pictures)
        requests = service.requests(response_id, prompt.token_ids, _options(body, prompt), "input", places)
    marks = service.chat.marks(tools=bool(body.use.offered)) if prompt is not None and prompt.parser is not None else ()
    return PreparedResponse(
        info=_info(service, body, response_id, stream_id, requests),
        requests=requests,
        stop=body.fields.stops,
        items=None if isinstance(body.prompt, tuple) else body.items,
        generates=body.fields.generate,
        parser=None if prompt is None else prompt.parser,
        # Text without special tokens would be text without marks.
        skip_special=not any(map(service.tokenizer.is_special, marks)),
        declared=body.use.declared,
    )


def _info(service: Service, body: ResponseCreate, response_id: str, stream_id: str, requests: Sequence[Request]) -> ResponseInfo:
    echoed: dict[str, Any] = {"text": {"format": {"type": "text"}}, "tools": (), "tool_choice": AUTO} | dict(body.echoed)
    return ResponseInfo(
        response_id=response_id,
        stream_id=stream_id,
        model=service.model.name,
        created_s=service.now_s(),
        max_output_tokens=requests[0].max_tokens if requests else 0,
        temperature=body.sampling.temperature,
        top_p=body.sampling.top_p,
        top_logprobs=body.logprobs or 0,
        instructions=body.fields.instructions,
        metadata=body.fields.metadata,
        previous_response_id=body.fields.previous_response_id,
        store=body.fields.store is not False and service.store.keeps,
        background=body.fields.background,
        parallel_tool_calls=body.use.parallel,
        effort=body.fields.reasoning.effort,
        warnings=service.left_out.warnings(body.left_out),
        **echoed,
    )


@dataclass(frozen=True)
class _Prompt:
    """A prompt, and what is to follow it.

    Attributes:
        parser: makes a parser of what follows; None where that is one text.
        format: what must follow; None leaves it free.
    """

    token_ids: tuple[int, ...]
    parser: Callable[[], MessageParser] | None = None
    format: OutputFormat | None = None


def _options(body: ResponseCreate, prompt: _Prompt) -> GenerationOptions:
    if not body.fields.generate:
        return GenerationOptions.of(body.fields, 1, "max_output_tokens")
    options = GenerationOptions.of(body.fields, body.fields.max_output_tokens, "max_output_tokens")
    return replace(options, sampling=body.sampling, logprobs=body.logprobs, format=prompt.format)


def _prefix(service: Service, body: ResponseCreate, pictures: Sequence[Picture | Video]) -> _Prompt | None:
    """The prompt of a response without an output; None for a conversation that has no prompt yet."""
    try:
        return replace(_prompt(service, body, pictures), parser=None, format=None)
    except RequestError as error:
        if error.code in ("chat_template_error", "empty_prompt"):
            return None
        raise


def _prompt(service: Service, body: ResponseCreate, pictures: Sequence[Picture | Video]) -> _Prompt:
    prompt, form = body.prompt, service.chat
    if isinstance(prompt, str):
        return _Prompt(service.encode(prompt, "input"), format=body.format)
    if not isinstance(prompt, Conversation):
        return _Prompt(service.checked(prompt, "input_token_ids"), format=body.format)
    try:
        # Without an output the next turn goes on here, and may have more to say first.
        chat = Chat(
            prompt.messages(),
            tools=body.use.offered or None,
            add_generation_prompt=body.fields.generate,
            variables=form.variables(body.fields.chat_template_kwargs, body.fields.reasoning.effort, "reasoning.effort"),
        )
        text, token_ids = rendered(service, chat, [picture.tokens for picture in pictures], "input")
    except RequestError as error:
        error.param = "input" if error.param == "messages" else error.param
        raise
    parses = body.fields.n == 1 and (form.reasoning is not None or bool(body.use.offered and form.tool_calls))
    parser = partial(form.parser, text, body.use.offered) if parses else None
    return _Prompt(token_ids, parser, form.reply(text, body.use, body.format))
