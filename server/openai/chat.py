"""`/v1/chat/completions`: conversations continued."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...graphs.errors import RequestError
from ...runtime.request import Request as EngineRequest
from ..chat.reply_grammar import check_choice
from ..chat.template import Chat
from ..engine.generation import GenerationOptions
from ..engine.prompts import Prompt, counted, prompt_of, reading, rendered
from ..engine.service import Service
from ..guard.work import off_loop
from ..parsers.message import MessageParser
from ..requests.left_out import LeftOut
from ..requests.tool_fields import Offer, ToolChoice, ToolUse
from .api import Api, client_of, fingerprint, length_of, new_id, options_of, takes_long, usage_wanted
from .chat_choice import ChatChoice
from .choices import ChunkFrames, Header, whole_answer
from .messages import messages_of, pictures_of
from .request_models import ChatRequest
from .sse import EventStream, whole


class ReadyChat(NamedTuple):
    """A chat that can be submitted.

    Attributes:
        so_far: what the message of the assistant has already that is continued.
    """

    prompt: Prompt
    requests: tuple[EngineRequest, ...]
    options: GenerationOptions
    use: ToolUse
    so_far: str


async def ready(api: Api, service: Service, body: ChatRequest, request: Request, name: str) -> ReadyChat:
    """Renders a chat and makes the engine's requests, of which `name` is the first one's id.

    Raises:
        RequestError: it cannot be served.
    """
    max_tokens, field = length_of(body)
    options = options_of(body, service, max_tokens, _logprobs(body), field)
    use = tool_use(body)
    check_choice(use, service.chat.tool_calls)
    if any(map(service.tokenizer.is_special, service.chat.marks(tools=bool(use.offered)))):
        # Text without special tokens would be text without marks.
        options = replace(options, skip_special_tokens=False)
    chat = chat_of(body, service)
    so_far = str(chat.messages[-1]["content"]) if chat.continue_final_message else ""
    takes = takes_long(sum(len(str(message["content"])) for message in chat.messages), options) or use.constrains

    pictures = pictures_of(body.messages)

    async with reading(service, pictures, body.mm_processor_kwargs, client_of(request), body.n) as read:

        def prepared() -> tuple[Prompt, tuple[EngineRequest, ...]]:
            prompt = prompt_of(service, chat, read, "messages")
            form = service.chat.reply(prompt.text, use, options.format, so_far=so_far)
            form_options = replace(options, format=form)
            return prompt, service.requests(name, prompt.token_ids, form_options, "messages", prompt.pictures)

        return ReadyChat(*await off_loop(takes, prepared), options, use, so_far)


async def chat_completions(api: Api, body: ChatRequest, request: Request) -> Response:
    """Answers a request.

    Raises:
        RequestError: it cannot be served.
    """
    service, usage = api.service(), usage_wanted(body)
    service.check_model(body.model)
    header = Header(
        id=new_id("chatcmpl-"),
        object="chat.completion",
        created=service.now_s(),
        model=service.model.name,
        system_fingerprint=fingerprint(service),
        chunk_object="chat.completion.chunk",
        warnings=service.left_out.warnings(_left_out(body)),
    )
    prompt, requests, options, use, so_far = await ready(api, service, body, request, header.id)
    choices = [
        ChatChoice(index, parser_of(body, service, prompt.text, so_far), body, prompt.token_ids, service.tokenizer, use.declared)
        for index in range(body.n)
    ]
    live = api.generate(header.id, requests, options, request, streams=body.stream)
    if body.stream:
        return EventStream(live, ChunkFrames(header, choices, body.n, usage, [len(prompt.token_ids)] * body.n))
    answer = whole_answer(header, choices, body.n, await whole(live, request.receive))
    if body.prompt_logprobs is not None:
        # In vLLM's chats all choices share them.
        answer["prompt_logprobs"] = choices[0].prompt_logprobs(body.prompt_logprobs)
    return JSONResponse(answer)


async def render_chat(api: Api, body: ChatRequest, _: Request) -> Response:
    """Token ids of a chat's prompt, in vLLM's answer; vllm-router asks for them before each request.

    Raises:
        RequestError: it cannot be served.
    """
    service = api.serving()
    service.check_model(body.model)
    chat = chat_of(body, service)
    chars = sum(len(str(message["content"])) for message in chat.messages)
    counts = await counted(service, pictures_of(body.messages), body.mm_processor_kwargs)
    prompt = (await off_loop(takes_long(chars), lambda: rendered(service, chat, counts, "messages")))[1]
    return JSONResponse({"token_ids": prompt})


def chat_of(body: ChatRequest, service: Service) -> Chat:
    """What the chat template is rendered with.

    Raises:
        RequestError: fields contradict each other, or a message is not legal.
    """
    if body.continue_final_message and body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set:
        message = "continue_final_message and add_generation_prompt are both true; legal is one of them"
        raise RequestError(message, param="continue_final_message")
    return Chat(
        messages=messages_of(body.messages),
        tools=tool_use(body).offered or None,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        variables=service.chat.variables(body.chat_template_kwargs, body.reasoning_effort, "reasoning_effort"),
    )


def parser_of(body: ChatRequest, service: Service, prompt: str, so_far: str) -> MessageParser:
    """What reads the reply to a rendered prompt."""
    return service.chat.parser(prompt, tool_use(body).offered, separate_reasoning=body.separate_reasoning, so_far=so_far)


def tool_use(body: ChatRequest) -> ToolUse:
    """The tools of a request, and what is to become of them."""
    return ToolUse.of([tool for tool in body.tools if isinstance(tool, Offer)], body.tool_choice, body.parallel_tool_calls)


def _left_out(body: ChatRequest) -> list[LeftOut]:
    chosen = body.tool_choice.left_out if isinstance(body.tool_choice, ToolChoice) else ()
    return [part for part in (*body.tools, *chosen) if isinstance(part, LeftOut)]


def _logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        if body.top_logprobs == 0:
            return None
        message = f"top_logprobs is {body.top_logprobs} and logprobs is false; legal is top_logprobs with logprobs: true"
        raise RequestError(message, param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None
