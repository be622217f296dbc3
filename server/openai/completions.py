"""`/v1/completions`: prompts continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...runtime.request import Logprobs
from ...runtime.request import Request as EngineRequest
from ..engine.generation import GenerationOptions
from ..engine.output_stream import CompletionEnd, TextDelta
from ..engine.service import Service
from ..guard.work import off_loop
from ..text.logprobs import finite, prompt_entries
from ..text.tokenizer import Detokenizer, TextTokenizer
from .api import Api, fingerprint, length_of, new_id, options_of, takes_long, usage_wanted
from .choices import FINISH_REASONS, ChunkFrames, Header, whole_answer
from .request_models import MAX_TOKENS, CompletionRequest, Prompt
from .sse import EventStream, whole


async def completions(api: Api, body: CompletionRequest, request: Request) -> Response:
    """Answers a request.

    Raises:
        RequestError: it cannot be served.
    """
    service, usage = api.service(), usage_wanted(body)
    service.check_model(body.model)
    max_tokens, field = length_of(body)
    options = options_of(body, service, MAX_TOKENS if max_tokens is None else max_tokens, body.logprobs, field, "logprobs")
    if body.echo and body.logprobs is not None:
        most, field = max((body.logprobs, "logprobs"), (options.prompt_logprobs or 0, "prompt_logprobs"))
        options = replace(options, prompt_logprobs=most, prompt_logprobs_field=field)
    header = Header(new_id("cmpl-"), "text_completion", service.now_s(), service.model.name, fingerprint(service), "text_completion")

    def prepared() -> tuple[list[tuple[int, ...]], list[EngineRequest]]:
        encoded = [_encoded(service, body, prompt) for prompt in body.prompt]
        return encoded, _requests(service, header.id, encoded, options)

    encoded, requests = await off_loop(takes_long(sum(map(len, body.prompt)), options), prepared)
    prompts = [ids for ids in encoded for _ in range(body.n)]
    choices = [CompletionChoice(index, ids, body, service.tokenizer) for index, ids in enumerate(prompts)]
    live = api.generate(header.id, requests, options, request, streams=body.stream)
    if body.stream:
        return EventStream(live, ChunkFrames(header, choices, body.n, usage, list(map(len, prompts))))
    return JSONResponse(whole_answer(header, choices, body.n, await whole(live, request.receive)))


async def render_completions(api: Api, body: CompletionRequest, _: Request) -> Response:
    """Token ids of each prompt, in vLLM's answer; vllm-router asks for them before each request.

    Raises:
        RequestError: one cannot be served.
    """
    service = api.serving()
    service.check_model(body.model)
    chars = sum(map(len, body.prompt))
    encoded = await off_loop(takes_long(chars), lambda: [_encoded(service, body, prompt) for prompt in body.prompt])
    return JSONResponse([{"token_ids": ids} for ids in encoded])


def _encoded(service: Service, body: CompletionRequest, prompt: Prompt) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return service.encode(prompt, "prompt", add_special=body.add_special_tokens)
    return service.checked(prompt, "prompt")


def _requests(service: Service, base: str, prompts: Sequence[tuple[int, ...]], options: GenerationOptions) -> list[EngineRequest]:
    names = [base] if len(prompts) == 1 else [f"{base}-{index}" for index in range(len(prompts))]
    several = zip(names, prompts, strict=True)
    return [request for name, prompt in several for request in service.requests(name, prompt, options, "prompt")]


class TextOffsets:
    """Where in a choice's text, in characters, the text of each token begins; that of a part of a character, where the character does.

    Args:
        start: characters before the first token.
    """

    def __init__(self, detokenizer: Detokenizer, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._chars = start

    def push(self, token_id: int) -> int:
        """The offset of the next token."""
        offset = self._chars
        self._chars += len(self._detokenizer.push((token_id,)))
        return offset


class CompletionChoice:
    """One completion. With `echo` its text begins with the prompt's, and its log probabilities with those of the prompt."""

    def __init__(self, index: int, prompt: tuple[int, ...], body: CompletionRequest, tokenizer: TextTokenizer) -> None:
        self._index = index
        self._prompt = prompt
        self._body = body
        self._tokenizer = tokenizer
        self._echo = tokenizer.decode(prompt, skip_special=body.skip_special_tokens) if body.echo else ""
        self._begun = False
        # Where the text of each token begins is asked token by token, so that no offset depends on which tokens came together.
        self._offsets = TextOffsets(tokenizer.detokenizer(skip_special=body.skip_special_tokens), len(self._echo))
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: dict[str, list[Any]] | None = None
        self._prompt_logprobs: tuple[Logprobs, ...] = ()
        self._finish_reason: str | None = None

    def chunk(self, delta: TextDelta | None, end: CompletionEnd | None) -> dict[str, Any]:
        first, self._begun = not self._begun, True
        text, ids = (delta.text, list(delta.token_ids)) if delta else ("", [])
        scored: list[tuple[int, Logprobs | None]] = []
        if first:
            self._prompt_logprobs = delta.prompt_logprobs if delta else ()
            if self._body.echo and self._body.logprobs is not None:
                # One that ended early may have been scored in part.
                scored += zip(self._prompt, (None, *self._prompt_logprobs), strict=False)
        echoed = len(scored)
        if delta and delta.logprobs:
            scored += zip(ids, delta.logprobs, strict=True)
        if end and end.ended_by:
            scored.append(end.ended_by)
        prefix, self._echo = self._echo, ""
        logprobs = self._logprobs_of(scored, echoed) if scored else None
        self._text.append(prefix + text)
        self._ids += ids
        self._finish_reason = FINISH_REASONS.get(end.reason) if end else None
        return self._object(prefix + text, ids, logprobs, self._finish_reason, self._prompt if first else None)

    def whole(self) -> dict[str, Any]:
        choice = self._object("".join(self._text), self._ids, self._logprobs, self._finish_reason, self._prompt)
        most = self._body.prompt_logprobs
        if most is None:
            return choice
        return choice | {"prompt_logprobs": prompt_entries(self._tokenizer.token_text, self._prompt, self._prompt_logprobs, most)}

    def _object(
        self, text: str, ids: list[int], logprobs: Any, finish_reason: str | None, prompt: tuple[int, ...] | None
    ) -> dict[str, Any]:
        choice = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return choice | ({"token_ids": ids, "prompt_token_ids": prompt} if self._body.return_token_ids else {})

    def _logprobs_of(self, scored: Sequence[tuple[int, Logprobs | None]], echoed: int) -> dict[str, list[Any]]:
        """Of new tokens, the first `echoed` of them the prompt's. The first token of a prompt has no log probability."""
        tokens = [self._tokenizer.token_text(token).text for token, _ in scored]
        prompt = TextOffsets(self._tokenizer.detokenizer(skip_special=self._body.skip_special_tokens)) if echoed else self._offsets
        offsets = [(prompt if place < echoed else self._offsets).push(token) for place, (token, _) in enumerate(scored)]
        values = [None if entry is None else finite(entry.logprob) for _, entry in scored]
        top = [None if entry is None else self._top(entry) for _, entry in scored]
        new: dict[str, list[Any]] = {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}
        if self._logprobs is None:
            self._logprobs = {name: [] for name in new}
        for name, entries in new.items():
            self._logprobs[name] += entries
        return new

    def _top(self, entry: Logprobs) -> dict[str, float]:
        """By text; of several tokens with the same text, the most likely one."""
        values: dict[str, float] = {}
        for token, value in entry.top[: self._body.logprobs]:
            values.setdefault(self._tokenizer.token_text(token).text, finite(value))
        return values
