"""`/generate`: completions with SGLang's native bodies, as its benchmark sends and reads them. Text is cumulative in a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...graphs.errors import RequestError
from ...runtime.request import Request as EngineRequest
from ...runtime.request import Sampling
from ..engine.generation import GenerationOptions, Output
from ..engine.output_stream import CompletionEnd, TextDelta
from ..engine.prompts import Prompt as EnginePrompt
from ..engine.prompts import reading, with_pictures
from ..engine.service import Service
from ..guard.work import off_loop
from ..pictures.processor import Picture
from ..pictures.prompt import encoded, expanded, in_order
from ..pictures.reader import count_of
from ..pictures.videos import Video
from ..requests.bodies import Body, FailFast, Ignored, Neutral, validate
from ..requests.bounds import MAX_COMPLETIONS, MAX_SALT_CHARS, MAX_TOP_LOGPROBS
from ..requests.error_objects import failure_of
from ..requests.fields import show
from ..requests.generation_fields import LogitBias, Priority, Seed, StopString, TokenId, chosen, seed_of, stop_strings
from ..requests.pictures import Kind, PicturePart, ProcessorFields, picture_part
from ..requests.router_fields import UNKNOWN_MODEL, RouterFields
from ..requests.structured_output import OutputFormat
from ..text.tokenizer import TextTokenizer
from .api import Api, client_of, defaults, new_id, takes_long
from .choices import check_in_time, pieces
from .errors import failure
from .request_models import MAX_STOP_TOKENS, Prompt, prompts
from .sse import EventStream, Frames, failure_frames, frame, whole

DEFAULT_NEW_TOKENS = 128
"""SGLang's."""

Absent = Neutral((), "it is not supported")


class SamplingParams(Body):
    """`sampling_params`."""

    max_new_tokens: Annotated[int, Field(ge=0)] = DEFAULT_NEW_TOKENS
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    sampling_seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], FailFast()] = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS), FailFast()] = Field(default_factory=list)
    ignore_eos: bool = False
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    skip_special_tokens: bool = True
    n: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] = 1
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias = ()
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Annotated[Any, Absent] = None
    no_stop_trim: Annotated[Any, Neutral((False,), "stop strings are cut off")] = None
    spaces_between_special_tokens: Annotated[Any, Neutral((True,), "text is what the tokenizer decodes")] = None
    stream_interval: Annotated[Any, Ignored("tokens of each step are sent at once")] = None
    custom_params: Annotated[Any, Absent] = None


class GenerateRequest(RouterFields):
    """`/generate`."""

    text: Annotated[Any, AfterValidator(prompts)] = None
    input_ids: Annotated[Any, AfterValidator(prompts)] = None
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    logprob_start_len: Annotated[int, Field(ge=-1)] = -1
    return_text_in_logprobs: bool = False
    priority: Priority = 0
    timeout_ms: Annotated[int, Field(ge=1)] | None = None
    rid: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    extra_key: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] = ""
    lora_path: Annotated[Any, Absent] = None
    image_data: Any = None
    video_data: Any = None
    mm_processor_kwargs: ProcessorFields | None = None
    input_embeds: Annotated[Any, Absent] = None
    token_ids_logprob: Annotated[Any, Absent] = None
    return_routed_experts: Annotated[Any, Neutral((False,), "graphs return none")] = None
    stream_options: Annotated[Any, Ignored("meta_info has the usage")] = None
    log_metrics: Annotated[Any, Ignored("metrics are of all requests")] = None
    background: Annotated[Any, Neutral((False,), "the answer is waited for")] = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    model: str | None = None


async def generate(api: Api, body: GenerateRequest, request: Request) -> Response:
    """Answers a request.

    Raises:
        RequestError: it cannot be served.
    """
    service = api.service()
    service.check_model(None if body.model == UNKNOWN_MODEL else body.model)
    # As vllm-router sets them at the top, in place of those that the client set.
    lengths = {"max_new_tokens": body.max_tokens, "min_new_tokens": body.min_tokens}
    params = validate(SamplingParams, body.sampling_params, "sampling_params")
    params = params.model_copy(update={name: value for name, value in lengths.items() if value is not None})
    given, param = _prompts(body)
    rid = body.rid or new_id("")
    options = _options(params, service, body)
    base = new_id("gen-")

    images = _parts(body.image_data, "image", len(given))
    shown = [own + films for own, films in zip(images, _parts(body.video_data, "video", len(given)), strict=True)]
    parts = [part for several in shown for part in several]

    async with reading(service, parts, body.mm_processor_kwargs, client_of(request), params.n) as read:
        left = iter(read)
        pictures = [[next(left) for _ in several] for several in shown]

        def prepared() -> list[EngineRequest]:
            prompts = [_encoded(service, prompt, param, shown) for prompt, shown in zip(given, pictures, strict=True)]
            _check_start(body, [prompt.token_ids for prompt in prompts])
            return [
                request
                for index, prompt in enumerate(prompts)
                for request in service.requests(f"{base}-{index}", prompt.token_ids, options, param, prompt.pictures)
            ]

        requests = await off_loop(takes_long(sum(map(len, given)), options), prepared)
    several = len(requests) > 1 or (isinstance(body.text, tuple) and len(body.text) > 1)
    rids = [rid] if len(requests) == 1 else [f"{rid}-{index}" for index in range(len(requests))]
    answers = [Answer(index, rids[index], body, engine_request.prompt, service.tokenizer) for index, engine_request in enumerate(requests)]
    live = api.generate(rid, requests, options, request, streams=body.stream)
    if body.stream:
        return EventStream(live, AnswerFrames(answers, several))
    for index, delta, end in pieces(await whole(live, request.receive)):
        answers[index].add(delta, end)
        if end is not None and end.reason == "error":
            raise failure(end)
    check_in_time([answer.end for answer in answers if answer.end is not None])
    objects = [answer.as_object() for answer in answers]
    return JSONResponse(objects if several else objects[0])


def _prompts(body: GenerateRequest) -> tuple[tuple[Prompt, ...], str]:
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("text and input_ids: legal is exactly one of them", param="text")
    if body.text is not None:
        if not all(isinstance(prompt, str) for prompt in body.text):
            raise RequestError("text holds other than strings; token ids go into input_ids", param="text")
        return body.text, "text"
    if any(isinstance(prompt, str) for prompt in body.input_ids):
        raise RequestError("input_ids holds a string; legal is a list of token ids, or a list of such lists", param="input_ids")
    return body.input_ids, "input_ids"


def _parts(data: Any, kind: Kind, prompts: int) -> list[list[PicturePart]]:
    """The pictures or videos of each prompt: of one a URL or a list of them, of several a list with one of these, or null, for each.

    Args:
        data: `image_data` or `video_data`.

    Raises:
        RequestError: it is of another form.
    """
    if data in (None, []):
        return [[] for _ in range(prompts)]
    field = f"{kind}_data"
    if prompts > 1 and not (isinstance(data, list) and len(data) == prompts):
        raise RequestError(f"{field} is {show(data)}; legal is a list with an entry for each of the {prompts} prompts", param=field)
    entries = [(field, data)] if prompts == 1 else [(f"{field}[{i}]", entry) for i, entry in enumerate(data)]
    return [
        [picture_part(url, f"{where}[{i}]", kind) for i, url in enumerate(entry)]
        if isinstance(entry, list)
        else []
        if entry is None
        else [picture_part(entry, where, kind)]
        for where, entry in entries
    ]


def _encoded(service: Service, prompt: Prompt, param: str, shown: Sequence[Picture | Video]) -> EnginePrompt:
    if service.pictures is None or not shown:
        ids = service.encode(prompt, param) if isinstance(prompt, str) else service.checked(prompt, param)
        return EnginePrompt(ids)
    vision = service.pictures.vision
    if isinstance(prompt, str):
        shown = in_order(prompt, shown, vision)
        counts = [count_of(each) for each in shown]
        ids = encoded(prompt, "", counts, vision, partial(service.encode_pieces, param=param, add_special=True), param)
    else:
        pictures = [each for each in shown if isinstance(each, Picture)]
        if len(pictures) < len(shown):
            message = f"{param} with {len(shown) - len(pictures)} videos, before whose frames texts stand; legal is text with video_data"
            raise RequestError(message, param="video_data", code="unsupported_value")
        ids = expanded(prompt, [picture.tokens for picture in pictures], vision, param)
    return EnginePrompt(service.checked(ids, param), with_pictures(service, ids, shown))


def _check_start(body: GenerateRequest, encoded: Sequence[tuple[int, ...]]) -> None:
    """Refuses log probabilities from a position on that some prompt does not have."""
    last = min(map(len, encoded)) - 1
    if body.logprob_start_len > (last if body.return_logprob else -1):
        legal = f"legal is -1, or with return_logprob up to {last}, the last position of the shortest prompt"
        raise RequestError(f"logprob_start_len is {body.logprob_start_len}; {legal}", param="logprob_start_len")


def _options(params: SamplingParams, service: Service, body: GenerateRequest) -> GenerationOptions:
    return GenerationOptions(
        max_tokens=params.max_new_tokens,
        max_tokens_field="max_new_tokens",
        sampling=Sampling(**chosen(params, defaults(service)), seed=seed_of(params.sampling_seed), min_tokens=params.min_new_tokens),
        stop=stop_strings(params.stop),
        stop_token_ids=frozenset(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=body.top_logprobs_num if body.return_logprob else None,
        logprobs_field="top_logprobs_num",
        prompt_logprobs=body.top_logprobs_num if body.return_logprob and body.logprob_start_len >= 0 else None,
        prompt_logprobs_from=body.logprob_start_len + 1,
        prompt_logprobs_field="logprob_start_len",
        n=params.n,
        skip_special_tokens=params.skip_special_tokens,
        format=_format(params),
        priority=body.priority,
        timeout_ms=body.timeout_ms,
        min_tokens_field="min_new_tokens",
        cache_salt=body.extra_key,
    )


def _format(params: SamplingParams) -> OutputFormat | None:
    kinds = {"json_schema": "json_schema", "regex": "regex", "ebnf": "grammar"}
    given = [OutputFormat(kind, value, name) for name, kind in kinds.items() if (value := getattr(params, name)) is not None]
    if len(given) > 1:
        raise RequestError(f"{given[0].param} and {given[1].param} are given; legal is one of them", param=given[1].param)
    return given[0] if given else None


class Answer:
    """One completion, and all that is known of it so far.

    Attributes:
        end: how it ended, once it has.
    """

    def __init__(self, index: int, rid: str, body: GenerateRequest, prompt: tuple[int, ...], tokenizer: TextTokenizer) -> None:
        self.index = index
        self._rid = rid
        self._tokenizer = tokenizer
        self._with_text = body.return_text_in_logprobs
        self._logprobs: list[Any] | None = [] if body.return_logprob else None
        self._top: list[Any] = []
        # SGLang's begin at this position, and with nothing for its token, wherever it is.
        self._input = prompt[body.logprob_start_len :] if body.return_logprob and body.logprob_start_len >= 0 else ()
        self._input_logprobs: list[Any] = [[None, token, self._text_of(token)] for token in self._input[:1]]
        self._input_top: list[Any] = [None for _ in self._input[:1]]
        self._text: list[str] = []
        self._ids: list[int] = []
        self.end: CompletionEnd | None = None

    def add(self, delta: TextDelta | None, end: CompletionEnd | None) -> None:
        """New text, the end, or both."""
        self.end = end
        if delta is None:
            return
        self._text.append(delta.text)
        self._ids += delta.token_ids
        for token, entry in zip(self._input[1:], delta.prompt_logprobs, strict=False):
            self._input_logprobs.append(self._entry(entry.logprob, token))
            self._input_top.append([self._entry(value, likely) for likely, value in entry.top])
        if self._logprobs is not None:
            entries = zip(delta.token_ids, delta.logprobs, strict=True)
            self._logprobs += [self._entry(entry.logprob, token) for token, entry in entries]
            self._top += [[self._entry(value, token) for token, value in entry.top] for entry in delta.logprobs]

    def as_object(self) -> dict[str, Any]:
        """All of it."""
        meta: dict[str, Any] = {"id": self._rid, "finish_reason": None, "completion_tokens": len(self._ids)}
        if self.end is not None:
            usage = self.end.usage
            meta |= {
                "finish_reason": _finish_reason(self.end),
                "prompt_tokens": usage.input_tokens,
                "completion_tokens": usage.output_tokens,
                "cached_tokens": usage.record.cached_tokens,
                "e2e_latency": usage.record.total_ms / 1e3,
                "spec_verify_ct": usage.record.verify_steps,
            }
        if self._logprobs is not None:
            meta |= {"input_token_logprobs": self._input_logprobs, "input_top_logprobs": self._input_top}
            meta |= {"output_token_logprobs": self._logprobs, "output_top_logprobs": self._top}
        return {"text": "".join(self._text), "output_ids": self._ids, "meta_info": meta}

    def _entry(self, logprob: float, token: int) -> list[Any]:
        return [logprob, token, self._text_of(token)]

    def _text_of(self, token: int) -> str | None:
        return self._tokenizer.token_text(token).text if self._with_text else None


def _finish_reason(end: CompletionEnd) -> dict[str, Any]:
    if end.reason == "length":
        return {"type": "length", "length": end.usage.output_tokens}
    if end.reason == "timeout":
        return {"type": "abort", "message": failure_of(end.message), "status_code": 504, "err_type": "timeout"}
    return {"type": "abort", "message": "aborted"} if end.reason == "cancelled" else {"type": "stop", "matched": None}


@dataclass
class AnswerFrames(Frames[Output]):
    """A stream of answers, each time with all that is known.

    Attributes:
        several: whether frames say whose they are.
    """

    answers: Sequence[Answer]
    several: bool
    failed: bool = False

    def feed(self, outputs: Sequence[Output]) -> list[bytes]:
        frames: list[bytes] = []
        for index, delta, end in pieces(outputs):
            if end is not None and end.reason == "error":
                self.failed = True
                return [*frames, *failure_frames(end.message, end.code)]
            self.answers[index].add(delta, end)
            body = self.answers[index].as_object()
            frames.append(frame(body | {"index": index} if self.several else body))
        return frames
