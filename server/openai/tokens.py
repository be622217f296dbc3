"""`/tokenize` and `/detokenize`, with vLLM's bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...graphs.errors import RequestError
from ..chat.template import Chat
from ..engine.prompts import counted, rendered
from ..engine.service import Service
from ..guard.work import off_loop
from ..pictures.reader import Count
from ..requests.bodies import Body, FailFast
from ..requests.generation_fields import TokenId
from ..requests.pictures import ProcessorFields
from ..requests.tool_fields import Offer, ToolUse
from .api import Api, takes_long
from .messages import messages_of, pictures_of
from .request_models import ChatTools, RequestMessage


class TokenizeRequest(Body):
    """`/tokenize`: of a prompt, or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[RequestMessage], Field(min_length=1), FailFast()] | None = None
    tools: ChatTools = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    mm_processor_kwargs: ProcessorFields | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """`/detokenize`."""

    model: str | None = None
    tokens: Annotated[list[TokenId], FailFast()]


async def tokenize(api: Api, body: TokenizeRequest, _: Request) -> Response:
    """Token ids of a text, and what the model takes.

    Raises:
        RequestError: there is not one text.
    """
    service = api.serving()
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt and messages: legal is exactly one of them", param="prompt")
    chars = len(body.prompt or "") + sum(len(str(message.content)) for message in body.messages or ())
    counts = await counted(service, pictures_of(body.messages or ()), body.mm_processor_kwargs)
    tokens = await off_loop(takes_long(chars), lambda: _tokens(service, body, counts))
    texts = [service.tokenizer.token_text(token).text for token in tokens] if body.return_token_strs else None
    return JSONResponse({"count": len(tokens), "max_model_len": service.model.max_model_len, "tokens": tokens, "token_strs": texts})


async def detokenize(api: Api, body: DetokenizeRequest, _: Request) -> Response:
    """The text of token ids, special tokens included."""
    service = api.serving()
    service.check_model(body.model)
    tokens = service.checked(tuple(body.tokens), "tokens") if body.tokens else ()
    return JSONResponse({"prompt": service.tokenizer.decode(tokens, skip_special=False)})


def _tokens(service: Service, body: TokenizeRequest, counts: Sequence[Count]) -> tuple[int, ...]:
    if body.messages is None:
        add_special = True if body.add_special_tokens is None else body.add_special_tokens
        return service.tokenizer.encode(body.prompt or "", add_special=add_special)
    chat = Chat(
        messages=messages_of(body.messages),
        tools=ToolUse.of([tool for tool in body.tools if isinstance(tool, Offer)], None, True).offered or None,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs,
    )
    return rendered(service, chat, counts, "messages", add_special=bool(body.add_special_tokens), bounded=False)[1]
