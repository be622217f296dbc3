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
from dataclasses import dataclass, field, replace
from typing import Any

from ...graphs.errors import RequestError
from ...runtime.request import Sampling
from .bounds import (
    MAX_BAD_WORDS,
    MAX_COMPLETIONS,
    MAX_METADATA,
    MAX_METADATA_CHARS,
    MAX_MODEL_CHARS,
    MAX_PRIORITY,
    MAX_RESPONSE_ID_CHARS,
    MAX_SALT_CHARS,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STREAM_ID_CHARS,
    MAX_TOP_LOGPROBS,
)
from .fields import FieldError, boolean, choices, integer, logit_bias, number, optional, refuse_unknown, show, string, strings, token_ids
from .items import ChatMessage, Item, read_items, template_messages, text_of
from .neutral import IGNORED, NEUTRAL, without_neutral
from .structured_output import OutputFormat, of_extension, of_responses
from .tool_fields import ToolUse, read_effort, read_tools, read_variables

INLINE_PROMPT_CHARS = 4096
"""Longer prompts are tokenized on a thread."""

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
"""Changes nothing: reasoning is told as it is."""


@dataclass(frozen=True)
class Conversation:
    """A prompt of several items; turning it into text takes a chat template.

    Attributes:
        instructions: what the system says before them.
    """

    items: tuple[Item, ...]
    instructions: str | None = None

    def messages(self) -> list[dict[str, Any]]:
        """The messages for a chat template."""
        system = () if self.instructions is None else (ChatMessage("system", self.instructions),)
        return template_messages((*system, *self.items))


Prompt = str | tuple[int, ...] | Conversation


@dataclass(frozen=True)
class ResponseCreate:
    """`response.create`: generate one response.

    Attributes:
        prompt: text, token ids, or a conversation.
        model: name of the model; None takes the served one.
        stream_id: the lane of the socket; None is the lane of all that name none.
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
        previous_response_id: the response whose conversation this one continues.
        store: whether the response is kept for later requests; None leaves it to the server.
        generate: whether there is to be an output; without one the prompt is only prepared.
        use: tools, and what is to become of them.
        echoed: `tools`, `tool_choice` and `text` as they were sent, repeated in the response.
        effort: of reasoning; None leaves it to the chat template.
        variables: of the chat template.
        background: whether it goes on to its end without a connection.
        resumable: whether it goes on for a while when its connection is lost, so that another can follow it.
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
    previous_response_id: str | None = None
    store: bool | None = None
    generate: bool = True
    background: bool = False
    resumable: bool = False
    use: ToolUse = field(default_factory=ToolUse)
    echoed: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def items(self) -> tuple[Item, ...]:
        """The prompt as items of a conversation: a text is what the user says, token ids say nothing."""
        if isinstance(self.prompt, Conversation):
            return self.prompt.items
        return (ChatMessage("user", self.prompt),) if isinstance(self.prompt, str) else ()

    def after(self, previous: tuple[Item, ...]) -> ResponseCreate:
        """The same behind the items of a conversation so far."""
        return replace(self, prompt=Conversation((*previous, *self.items), self.instructions))

    @property
    def prompt_chars(self) -> int:
        """Characters of the prompt that have to be tokenized."""
        if isinstance(self.prompt, Conversation):
            return len(self.prompt.instructions or "") + sum(len(text_of(item)) for item in self.prompt.items)
        return len(self.prompt) if isinstance(self.prompt, str) else 0

    @property
    def takes_long(self) -> bool:
        """Whether it is better prepared on a thread, so that it does not block the streams of others: a long prompt, or a grammar."""
        return self.prompt_chars > INLINE_PROMPT_CHARS or self.format is not None or self.use.constrains


def read_create(body: dict[str, Any]) -> ResponseCreate:
    """The body of a `response.create`, without `stream`, which depends on the transport.

    Raises:
        FieldError: a field is missing, unknown, or has an illegal value.
    """
    refuse_unknown(body, (*CREATE_FIELDS, *NEUTRAL, *IGNORED), "response.create")
    body = without_neutral({name: value for name, value in body.items() if value is not None})
    return ResponseCreate(
        prompt=_prompt(body, optional(body, "instructions", string())),
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
        previous_response_id=optional(body, "previous_response_id", string(MAX_RESPONSE_ID_CHARS)),
        store=optional(body, "store", boolean),
        generate=_generates(body),
        background=optional(body, "background", boolean) or False,
        resumable=optional(body, "resumable", boolean) or False,
        use=_tools(body),
        echoed={name: body[name] for name in ("tools", "tool_choice", "text") if name in body},
        effort=read_effort(body),
        variables=optional(body, "chat_template_kwargs", read_variables) or {},
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
    "previous_response_id",
    "store",
    "generate",
    "background",
    "resumable",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning",
    "chat_template_kwargs",
)


def _prompt(body: Mapping[str, Any], instructions: str | None) -> Prompt:
    names = [name for name in ("input", "input_token_ids") if name in body]
    prepares = body.get("generate") is False or "previous_response_id" in body
    if len(names) != 1 and (names or not prepares):
        raise FieldError(f"{' and '.join(names) or 'no input'} given; legal is exactly one of input, input_token_ids", param="input")
    if names == ["input_token_ids"]:
        return _token_ids(body)
    value = body.get("input", [])
    if isinstance(value, str):
        said = Conversation((ChatMessage("user", value),), instructions)
        return value if instructions is None and not body.get("tools") else said
    return Conversation(read_items(value), instructions)


def _token_ids(body: Mapping[str, Any]) -> tuple[int, ...]:
    value = body["input_token_ids"]
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise FieldError(f"input_token_ids is {show(value)}; legal is a list of integers", param="input_token_ids")
    for name in ("instructions", "previous_response_id", "tools"):
        if body.get(name):
            raise FieldError(f"{name} and input_token_ids are given; legal is {name} with input", param=name)
    return tuple(value)


def _tools(body: Mapping[str, Any]) -> ToolUse:
    use = read_tools(body)
    if use.tools and body.get("n") not in (None, 1):
        raise FieldError(f"n is {body['n']} and there are tools; legal is 1 or absent", param="n")
    return use


def _generates(body: Mapping[str, Any]) -> bool:
    generates = optional(body, "generate", boolean)
    if generates is False and body.get("n") not in (None, 1):
        raise FieldError(f"n is {body['n']} and generate is false; legal is 1 or absent", param="n")
    return generates is not False


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
    included = LOGPROBS in (optional(body, "include", choices((LOGPROBS, ENCRYPTED))) or ())
    most_likely = optional(body, "top_logprobs", integer(0, MAX_TOP_LOGPROBS))
    return 0 if included and most_likely is None else most_likely
