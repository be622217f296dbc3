"""The body of `response.create` and of `POST /v1/responses`, validated.

Log probabilities are requested as in OpenAI's API: "message.output_text.logprobs" in `include` gives those of the output tokens,
`top_logprobs` adds those of the most likely tokens at each position; here `top_logprobs` is enough by itself. Without `temperature`
sampling is greedy; the response object has the values that were used. A field that is null counts as absent.

A message list goes through the model's chat template, with `instructions` as the system's message before it; a text does not: it is
continued as it is. Fields that change nothing are accepted at the values that change nothing (`neutral`).

Extensions to OpenAI's body, all optional: `input_token_ids`, `top_k`, `min_p`, `seed`, `stop`, `ignore_eos`, `presence_penalty`,
`frequency_penalty`, `repetition_penalty`, `logit_bias`, `min_tokens`, `allowed_token_ids`, `bad_words`, `n` (completions, each an output
item; see `service`), `speculative_tokens` (draft tokens to verify per step; 0 is off), `priority`, `timeout_ms`, `cache_salt` and
`skip_reading_prefix_cache` (see `runtime.request.Request`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..graphs.errors import RequestError
from ..runtime.request import Sampling
from .fields import FieldError, boolean, choices, integer, logit_bias, number, optional, refuse_unknown, show, string, strings, token_ids
from .limits import MAX_PRIORITY
from .neutral import IGNORED, NEUTRAL, without_neutral
from .structured_output import OutputFormat, of_extension, of_responses

INLINE_PROMPT_CHARS = 4096
"""Longer prompts are tokenized on a thread."""

MAX_STREAM_ID_CHARS = 128
MAX_MODEL_CHARS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 256
MAX_SEED = 2**63 - 1
MAX_TOP_LOGPROBS = 20
MAX_COMPLETIONS = 8
MAX_METADATA = 16
MAX_METADATA_CHARS = 512
MAX_SALT_CHARS = 256
MAX_MESSAGES = 4096
LOGPROBS = "message.output_text.logprobs"
ROLES = ("user", "system", "developer", "assistant")
TEXT_PARTS = ("input_text", "output_text")


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    text: str


@dataclass(frozen=True)
class Conversation:
    """A prompt of several messages; turning it into text takes a chat template."""

    messages: tuple[ChatMessage, ...]


Prompt = str | tuple[int, ...] | Conversation


@dataclass(frozen=True)
class ResponseCreate:
    """`response.create`: generate one response.

    Attributes:
        prompt: text, token ids, or a conversation.
        model: name of the model; None takes the served one.
        stream_id: names the response among those open on the socket; None lets the server choose.
        max_output_tokens: None means as many as fit into the context.
        stop: strings that end the output and are not part of it.
        ignore_eos: generate past end-of-sequence tokens.
        logprobs: None for no log probabilities; else those of the output tokens and of this many most likely tokens at each position.
        n: completions of the prompt.
        speculative_tokens: draft tokens to verify per step, 0 for none; None means as many as the artifact was built for.
        instructions: what the system says before the input; part of `prompt` too.
        metadata: the client's, repeated in the response.
        format: what the output must be; None leaves it free.
        priority: lower is served first.
        timeout_ms: how long it may wait and run; None is the server's own timeout.
        bad_words: texts that the output must not hold.
        cache_salt, skip_reading_prefix_cache: as in `runtime.request.Request`.
    """

    prompt: Prompt
    model: str | None = None
    stream_id: str | None = None
    max_output_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    speculative_tokens: int | None = None
    instructions: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    format: OutputFormat | None = None
    priority: int = 0
    timeout_ms: int | None = None
    bad_words: tuple[str, ...] = ()
    cache_salt: str = ""
    skip_reading_prefix_cache: bool = False

    @property
    def prompt_chars(self) -> int:
        """Characters of the prompt that have to be tokenized."""
        if isinstance(self.prompt, Conversation):
            return sum(len(message.text) for message in self.prompt.messages)
        return len(self.prompt) if isinstance(self.prompt, str) else 0

    @property
    def takes_long(self) -> bool:
        """Whether it is better prepared on a thread, so that it does not block the streams of others: a long prompt, or a grammar."""
        return self.prompt_chars > INLINE_PROMPT_CHARS or self.format is not None


def read_create(body: dict[str, Any]) -> ResponseCreate:
    """The body of a `response.create`, without `stream`, which depends on the transport.

    Raises:
        FieldError: a field is missing, unknown, or has an illegal value.
    """
    refuse_unknown(body, (*CREATE_FIELDS, *NEUTRAL, *IGNORED), "response.create")
    body = without_neutral({name: value for name, value in body.items() if value is not None})
    return ResponseCreate(
        prompt=_with_instructions(_prompt(body), optional(body, "instructions", string())),
        model=optional(body, "model", string(MAX_MODEL_CHARS)),
        stream_id=optional(body, "stream_id", string(MAX_STREAM_ID_CHARS)),
        max_output_tokens=optional(body, "max_output_tokens", integer(1)),
        sampling=_sampling(body),
        stop=optional(body, "stop", strings(MAX_STOP_STRINGS, MAX_STOP_CHARS, alone=True)) or (),
        ignore_eos=optional(body, "ignore_eos", boolean) or False,
        logprobs=_logprobs(body),
        n=optional(body, "n", integer(1, MAX_COMPLETIONS)) or 1,
        speculative_tokens=optional(body, "speculative_tokens", integer(0)),
        instructions=body.get("instructions"),
        metadata=optional(body, "metadata", _metadata) or {},
        format=_format(body),
        priority=optional(body, "priority", integer(-MAX_PRIORITY, MAX_PRIORITY)) or 0,
        timeout_ms=optional(body, "timeout_ms", integer(1)),
        bad_words=optional(body, "bad_words", strings(MAX_BAD_WORDS, MAX_STOP_CHARS)) or (),
        cache_salt=optional(body, "cache_salt", string(MAX_SALT_CHARS)) or "",
        skip_reading_prefix_cache=optional(body, "skip_reading_prefix_cache", boolean) or False,
    )


CREATE_FIELDS = (
    "input",
    "input_token_ids",
    "model",
    "stream_id",
    "max_output_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "allowed_token_ids",
    "bad_words",
    "include",
    "top_logprobs",
    "n",
    "speculative_tokens",
    "cache_salt",
    "skip_reading_prefix_cache",
    "instructions",
    "metadata",
    "text",
    "structured_outputs",
    "priority",
    "timeout_ms",
    "stream",
)


def _prompt(body: Mapping[str, Any]) -> Prompt:
    names = [name for name in ("input", "input_token_ids") if name in body]
    if len(names) != 1:
        raise FieldError(f"{' and '.join(names) or 'no input'} given; legal is exactly one of input, input_token_ids", param="input")
    value = body[names[0]]
    if names[0] == "input_token_ids":
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise FieldError(f"input_token_ids is {show(value)}; legal is a list of integers", param="input_token_ids")
        return tuple(value)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise FieldError(f"input is {show(value)}; legal is a string or a list of message items", param="input")
    if len(value) > MAX_MESSAGES:
        raise FieldError(f"input has {len(value)} messages; legal are at most {MAX_MESSAGES}", param="input")
    return Conversation(tuple(_message(item, f"input[{i}]") for i, item in enumerate(value)))


def _with_instructions(prompt: Prompt, instructions: str | None) -> Prompt:
    if instructions is None:
        return prompt
    if isinstance(prompt, tuple):
        raise FieldError("instructions and input_token_ids are given; legal is instructions with input", param="instructions")
    messages = (ChatMessage("user", prompt),) if isinstance(prompt, str) else prompt.messages
    return Conversation((ChatMessage("system", instructions), *messages))


def _format(body: Mapping[str, Any]) -> OutputFormat | None:
    standard, extended = optional(body, "text", of_responses), optional(body, "structured_outputs", of_extension)
    if standard and extended:
        raise FieldError("text.format and structured_outputs are given; legal is one of them", param="structured_outputs")
    return standard or extended


def _metadata(value: Any, name: str) -> dict[str, str]:
    legal = isinstance(value, dict) and len(value) <= MAX_METADATA and all(isinstance(entry, str) for entry in value.values())
    if not legal or any(len(entry) > MAX_METADATA_CHARS for item in value.items() for entry in item):
        shown = f"an object of at most {MAX_METADATA} strings of up to {MAX_METADATA_CHARS} characters"
        raise FieldError(f"{name} is {show(value)}; legal is {shown}", param=name)
    return dict(value)


def _message(item: Any, where: str) -> ChatMessage:
    if not isinstance(item, dict):
        raise FieldError(f"{where} is {show(item)}; legal is a message object (token ids go into input_token_ids)", param=where)
    # With what an output item of an earlier response has.
    refuse_unknown(item, ("type", "role", "content", "id", "status", "phase"), where)
    if item.get("type", "message") != "message":
        raise FieldError(f"{where}.type is {show(item['type'])}; legal is 'message'", param=f"{where}.type")
    if item.get("role") not in ROLES:
        raise FieldError(f"{where}.role is {show(item.get('role'))}; legal are {list(ROLES)}", param=f"{where}.role")
    content = item.get("content")
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise FieldError(f"{where}.content is {show(content)}; legal is a string or a list of parts", param=f"{where}.content")
    if len(parts) > MAX_MESSAGES:
        raise FieldError(f"{where}.content has {len(parts)} parts; legal are at most {MAX_MESSAGES}", param=f"{where}.content")
    for i, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
            at = f"{where}.content[{i}]"
            raise FieldError(f"{at} is {show(part)}; legal is an object with type in {list(TEXT_PARTS)} and text", param=at)
    return ChatMessage(item["role"], "".join(part["text"] for part in parts))


def _sampling(body: Mapping[str, Any]) -> Sampling:
    fields = {name: body[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed") if name in body}
    for name, most in (("top_k", 2**31 - 1), ("seed", MAX_SEED)):
        optional(fields, name, integer(0, most))
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        fields |= {name: number(body[name], name)} if name in body else {}
    fields["logit_bias"] = optional(body, "logit_bias", logit_bias) or ()
    fields["min_tokens"] = optional(body, "min_tokens", integer(0)) or 0
    fields["allowed_token_ids"] = optional(body, "allowed_token_ids", token_ids)
    try:
        return Sampling(**fields)
    except RequestError as error:
        raise FieldError(str(error), param=error.param or "temperature") from None


def _logprobs(body: Mapping[str, Any]) -> int | None:
    included = LOGPROBS in (optional(body, "include", choices((LOGPROBS,))) or ())
    most_likely = optional(body, "top_logprobs", integer(0, MAX_TOP_LOGPROBS))
    return 0 if included and most_likely is None else most_likely
