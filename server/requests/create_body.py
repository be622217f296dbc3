"""The body of `response.create` and of `POST /v1/responses`, validated.

Log probabilities are requested as in OpenAI's API: "message.output_text.logprobs" in `include` gives those of the output tokens,
`top_logprobs` adds those of the most likely tokens at each position; here `top_logprobs` is enough by itself. Without `temperature`
sampling is greedy; the response object has the values that were used. A field that is null counts as absent.

A message list goes through the model's chat template, with `instructions` as the system's message before it; a text does not: it is
continued as it is. Fields that change nothing are accepted at the values that change nothing.

Extensions to OpenAI's body, all optional: `input_token_ids`, `top_k`, `min_p`, `seed`, `stop`, `ignore_eos`, `presence_penalty`,
`frequency_penalty`, `repetition_penalty`, `logit_bias`, `min_tokens`, `allowed_token_ids`, `bad_words`, `n` (completions, each an output
item; see `service`), `speculative_tokens` (draft tokens to verify per step; 0 is off), `priority`, `timeout_ms`, `cache_salt` and
`skip_reading_prefix_cache` (see `runtime.request.Request`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator

from ...graphs.errors import RequestError
from ...runtime.request import Sampling
from .bodies import FailFast, Ignored, Neutral, validate
from .bounds import (
    MAX_METADATA,
    MAX_METADATA_CHARS,
    MAX_MODEL_CHARS,
    MAX_RESPONSE_ID_CHARS,
    MAX_STREAM_ID_CHARS,
    MAX_TOP_LOGPROBS,
)
from .fields import FieldError
from .generation_fields import GenerationFields
from .items import AddedTools, ChatMessage, Item, pictures_of, read_items, template_messages, text_of
from .left_out import LeftOut
from .pictures import PicturePart, ProcessorFields
from .structured_output import OutputFormat, of_responses
from .tool_fields import AUTO, Offer, ReasoningField, ToolChoice, ToolUse
from .tools import read_choice, read_tools

INLINE_PROMPT_CHARS = 4096
"""Longer prompts are tokenized on a thread."""

LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""All but the first change nothing: reasoning is told as it is, and no output has the others."""


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

FOR_THE_PROVIDER = "the provider's bookkeeping"
StreamId = Annotated[str, Field(min_length=1, max_length=MAX_STREAM_ID_CHARS)]


def _input(value: Any) -> str | tuple[Item | LeftOut, ...]:
    return value if isinstance(value, str) else read_items(value)


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError("a list of integers")
    return tuple(value)


def _metadata(value: Any) -> dict[str, str]:
    legal = isinstance(value, dict) and len(value) <= MAX_METADATA and all(isinstance(entry, str) for entry in value.values())
    if not legal or any(len(entry) > MAX_METADATA_CHARS for item in value.items() for entry in item):
        raise ValueError(f"an object of at most {MAX_METADATA} strings of up to {MAX_METADATA_CHARS} characters")
    return dict(value)


class CreateFields(GenerationFields):
    """The fields of `response.create`; see docs/api.md."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)] | None = None
    input: Annotated[str | tuple[Item | LeftOut, ...] | None, PlainValidator(_input)] = None
    input_token_ids: Annotated[tuple[int, ...] | None, PlainValidator(_token_ids)] = None
    stream_id: StreamId | None = None
    instructions: Annotated[str | None, AfterValidator(lambda text: text or None)] = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    include: Annotated[list[Included], FailFast()] = Field(default_factory=list)
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    metadata: Annotated[dict[str, str], PlainValidator(_metadata)] = Field(default_factory=dict)
    text: Annotated[OutputFormat | None, PlainValidator(of_responses)] = None
    stream: bool | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=MAX_RESPONSE_ID_CHARS)] | None = None
    store: bool | None = None
    generate: bool = True
    background: bool = False
    resumable: bool = False
    tools: Annotated[tuple[Offer | LeftOut, ...], PlainValidator(read_tools)] = ()
    tool_choice: Annotated[ToolChoice | str, PlainValidator(read_choice)] = AUTO
    parallel_tool_calls: bool = True
    reasoning: ReasoningField = ReasoningField()
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    mm_processor_kwargs: ProcessorFields | None = None
    truncation: Annotated[Any, Neutral(("disabled",), "prompts are not cut")] = None
    prompt: Annotated[Any, Neutral((), "prompts are not kept")] = None
    conversation: Annotated[Any, Neutral((), "conversations are not kept")] = None
    context_management: Annotated[Any, Neutral(([],), "prompts are not cut")] = None
    user: Annotated[Any, Ignored(FOR_THE_PROVIDER)] = None
    safety_identifier: Annotated[Any, Ignored(FOR_THE_PROVIDER)] = None
    prompt_cache_key: Annotated[Any, Ignored("a hint for caches")] = None
    prompt_cache_retention: Annotated[Any, Ignored("a hint for caches")] = None
    prompt_cache_options: Annotated[Any, Ignored("a hint for caches")] = None
    service_tier: Annotated[Any, Ignored(FOR_THE_PROVIDER)] = None
    client_metadata: Annotated[Any, Ignored(FOR_THE_PROVIDER)] = None
    max_tool_calls: Annotated[Any, Ignored("concerns tools of the provider")] = None


@dataclass(frozen=True)
class ResponseCreate:
    """`response.create`: generate one response.

    Attributes:
        fields: as they were sent.
        prompt: text, token ids, or a conversation.
        sampling: how tokens are picked.
        use: tools, and what is to become of them.
        echoed: `tools`, `tool_choice` and `text` as they were sent, repeated in the response.
    """

    fields: CreateFields
    prompt: Prompt
    sampling: Sampling
    use: ToolUse
    echoed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def logprobs(self) -> int | None:
        """None for no log probabilities; else those of the output tokens and of this many most likely tokens at each position."""
        included = LOGPROBS in self.fields.include
        return 0 if included and self.fields.top_logprobs is None else self.fields.top_logprobs

    @property
    def format(self) -> OutputFormat | None:
        """What the output must be; None leaves it free."""
        return self.fields.text or self.fields.structured_outputs

    @property
    def left_out(self) -> list[LeftOut]:
        """The parts of the body that its prompt does not have."""
        given = self.fields.input if isinstance(self.fields.input, tuple) else ()
        choice = self.fields.tool_choice
        tools = [*self.fields.tools, *(tool for item in given if isinstance(item, AddedTools) for tool in item.tools)]
        chosen = choice.left_out if isinstance(choice, ToolChoice) else ()
        return [part for part in (*tools, *given, *chosen) if isinstance(part, LeftOut)]

    @property
    def items(self) -> tuple[Item, ...]:
        """The prompt as items of a conversation: a text is what the user says, token ids say nothing."""
        if isinstance(self.prompt, Conversation):
            return self.prompt.items
        return (ChatMessage("user", self.prompt),) if isinstance(self.prompt, str) else ()

    @property
    def pictures(self) -> list[PicturePart]:
        """The pictures of the prompt, in order."""
        return pictures_of(self.items)

    def after(self, previous: tuple[Item, ...]) -> ResponseCreate:
        """The same behind the items of a conversation so far."""
        items = (*previous, *self.items)
        return replace(self, prompt=Conversation(items, self.fields.instructions), use=_use(self.fields, items))

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
    """The body of a `response.create`; what `stream` may be depends on the transport.

    Raises:
        FieldError: a field is missing, unknown, or has an illegal value.
    """
    fields = validate(CreateFields, body, "response.create")
    echoed = {name: body[name] for name in ("tools", "tool_choice", "text") if body.get(name) is not None}
    if fields.n > 1 and (fields.tools or not fields.generate):
        why = "there are tools" if fields.tools else "generate is false"
        raise FieldError(f"n is {fields.n} and {why}; legal is 1 or absent", param="n")
    if fields.text and fields.structured_outputs:
        raise FieldError("text.format and structured_outputs are given; legal is one of them", param="structured_outputs")
    try:
        sampling = fields.sampling({})
    except RequestError as error:
        raise FieldError(str(error), param=error.param or "temperature") from None
    prompt = _prompt(fields)
    items = prompt.items if isinstance(prompt, Conversation) else ()
    return ResponseCreate(fields, prompt, sampling, _use(fields, items), echoed)


def _prompt(fields: CreateFields) -> Prompt:
    names = [name for name in ("input", "input_token_ids") if getattr(fields, name) is not None]
    prepares = not fields.generate or fields.previous_response_id is not None
    if len(names) != 1 and (names or not prepares):
        raise FieldError(f"{' and '.join(names) or 'no input'} given; legal is exactly one of input, input_token_ids", param="input")
    if fields.input_token_ids is not None:
        for name in ("instructions", "previous_response_id", "tools"):
            if getattr(fields, name):
                raise FieldError(f"{name} and input_token_ids are given; legal is {name} with input", param=name)
        return fields.input_token_ids
    if isinstance(fields.input, str):
        message = ChatMessage("user", fields.input)
        alone = fields.instructions is None and not fields.tools
        return fields.input if alone else Conversation((message,), fields.instructions)
    if fields.input == () and not prepares and fields.instructions is None:
        raise FieldError("input is [], without instructions or previous_response_id; legal is at least one item", param="input")
    items = tuple(item for item in fields.input or () if not isinstance(item, LeftOut))
    return Conversation(items, fields.instructions)


def _use(fields: CreateFields, items: Sequence[Item]) -> ToolUse:
    """The tools of the body, and those that items of its conversation bring."""
    brought = [tool for item in items if isinstance(item, AddedTools) for tool in item.tools]
    offers = [tool for tool in (*fields.tools, *brought) if isinstance(tool, Offer)]
    return ToolUse.of(offers, fields.tool_choice, fields.parallel_tool_calls)
