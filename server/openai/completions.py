"""`/v1/completions`: prompts continued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...graphs.errors import RequestError
from ...runtime.request import Request as EngineRequest
from ..events import CompletionEnd
from ..generation import GenerationOptions
from ..logprobs import LEAST_LOGPROB
from ..output_stream import TextDelta
from ..service import Service
from ..tokenizer import TextTokenizer
from .api import Api, client_of, fingerprint, includes_usage, new_id, off_loop, options_of, takes_long
from .choices import FINISH_REASONS, ChunkFrames, Header, whole_answer
from .request_models import CompletionRequest, Prompt
from .sse import EventStream, whole


async def completions(api: Api, body: CompletionRequest, request: Request) -> Response:
    """Answers a request.

    Raises:
        RequestError: it cannot be served.
    """
    service, usage = api.service(), includes_usage(body)
    service.check_model(body.model)
    if body.echo and body.logprobs is not None:
        message = "echo is true and logprobs is set; prefill graphs return no log probabilities of the prompt, so legal is one of them"
        raise RequestError(message, param="logprobs", code="unsupported_value")
    options = options_of(body, service, body.max_tokens, body.logprobs, "max_tokens", "logprobs")
    header = Header(new_id("cmpl-"), "text_completion", service.now_s(), service.model.name, fingerprint(service), "text_completion")

    def made() -> tuple[list[tuple[int, ...]], list[EngineRequest]]:
        encoded = [_encoded(service, body, prompt) for prompt in body.prompt]
        return encoded, _requests(service, header.id, encoded, options)

    encoded, requests = await off_loop(takes_long(sum(map(len, body.prompt)), options), made)
    prompts = [ids for ids in encoded for _ in range(body.n)]
    choices = [CompletionChoice(index, ids, body, service.tokenizer) for index, ids in enumerate(prompts)]
    live = api.generate(header.id, requests, options, client_of(request), streams=body.stream)
    if body.stream:
        return EventStream(live, ChunkFrames(header, choices, body.n, usage))
    return JSONResponse(whole_answer(header, choices, body.n, await whole(live, request.receive)))


def _encoded(service: Service, body: CompletionRequest, prompt: Prompt) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return service.encode(prompt, "prompt", add_special=body.add_special_tokens)
    return service.checked(prompt, "prompt")


def _requests(service: Service, base: str, prompts: Sequence[tuple[int, ...]], options: GenerationOptions) -> list[EngineRequest]:
    names = [base] if len(prompts) == 1 else [f"{base}-{index}" for index in range(len(prompts))]
    several = zip(names, prompts, strict=True)
    return [request for name, prompt in several for request in service.requests(name, prompt, options, "prompt")]


class CompletionChoice:
    """One completion. With `echo` its text begins with the prompt's."""

    def __init__(self, index: int, prompt: tuple[int, ...], body: CompletionRequest, tokenizer: TextTokenizer) -> None:
        self._index = index
        self._prompt = prompt
        self._returns_ids = body.return_token_ids
        self._tokenizer = tokenizer
        self._echo = tokenizer.decode(prompt, skip_special=body.skip_special_tokens) if body.echo else ""
        self._chars = 0
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: dict[str, list[Any]] | None = None
        self._finish_reason: str | None = None

    def chunk(self, delta: TextDelta | None, end: CompletionEnd | None) -> dict[str, Any]:
        text = self._echo + (delta.text if delta else "")
        first, self._echo = not self._text, ""
        ids = list(delta.token_ids) if delta else []
        logprobs = self._logprobs_of(delta) if delta and delta.logprobs else None
        self._text.append(text)
        self._ids += ids
        self._chars += len(text)
        self._finish_reason = FINISH_REASONS.get(end.reason) if end else None
        return self._object(text, ids, logprobs, self._finish_reason, self._prompt if first else None)

    def whole(self) -> dict[str, Any]:
        return self._object("".join(self._text), self._ids, self._logprobs, self._finish_reason, self._prompt)

    def _object(
        self, text: str, ids: list[int], logprobs: Any, finish_reason: str | None, prompt: tuple[int, ...] | None
    ) -> dict[str, Any]:
        choice = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return choice | ({"token_ids": ids, "prompt_token_ids": prompt} if self._returns_ids else {})

    def _logprobs_of(self, delta: TextDelta) -> dict[str, list[Any]]:
        """Of a delta's tokens; `text_offset` counts characters of the choice's text, with tokens as long as their texts."""
        tokens = [self._tokenizer.token_text(token).text for token in delta.token_ids]
        offsets = [self._chars]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        top = [
            {self._tokenizer.token_text(token).text: max(value, LEAST_LOGPROB) for token, value in entry.top} for entry in delta.logprobs
        ]
        values = [max(entry.logprob, LEAST_LOGPROB) for entry in delta.logprobs]
        new: dict[str, list[Any]] = {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets[:-1]}
        if self._logprobs is None:
            self._logprobs = {name: [] for name in new}
        for name, entries in new.items():
            self._logprobs[name] += entries
        return new
