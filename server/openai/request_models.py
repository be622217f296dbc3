"""Bodies of OpenAI's requests, with the extensions of vLLM and SGLang that are supported here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, PlainValidator, Tag

from ..requests.bodies import HINT, Body, FailFast, Ignored, Neutral
from ..requests.bounds import MAX_TOP_LOGPROBS
from ..requests.generation_fields import GenerationFields, TokenId
from ..requests.left_out import LeftOut
from ..requests.pictures import Detail, ProcessorFields, UrlText, url_text
from ..requests.structured_output import OutputFormat, of_chat
from ..requests.tool_fields import Effort, Offer, ToolChoice
from ..requests.tools import read_chat_tools, read_choice

MAX_PROMPTS = 1024
MAX_TOKENS = 16
"""Of a completion that does not say how many; OpenAI's."""
MAX_STOP_TOKENS = 256
FOR_THE_PROVIDER = "concerns the provider's bookkeeping"


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(GenerationFields):
    """What both endpoints share."""

    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS), FailFast()] = Field(default_factory=list)
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: Annotated[OutputFormat | None, PlainValidator(of_chat)] = None
    user: Annotated[Any, Ignored(FOR_THE_PROVIDER)] = None
    metadata: Annotated[Any, Ignored(FOR_THE_PROVIDER)] = None
    store: Annotated[Any, Neutral((False,), "completions are not kept")] = None
    length_penalty: Annotated[Any, Neutral((1,), "there is no beam search")] = None
    use_beam_search: Annotated[Any, Neutral((False,), "there is no beam search")] = None
    include_stop_str_in_output: Annotated[Any, Neutral((False,), "stop strings are cut off")] = None
    spaces_between_special_tokens: Annotated[Any, Neutral((True,), "text is what the tokenizer decodes")] = None
    return_tokens_as_token_ids: Annotated[Any, Neutral((False,), "return_token_ids has them")] = None
    truncate_prompt_tokens: Annotated[Any, Neutral((), "prompts are not cut")] = None
    request_id: Annotated[Any, Neutral((), "the server makes ids")] = None


Prompt = str | tuple[int, ...]


def prompts(value: Any) -> tuple[Prompt, ...]:
    """The prompts of a request: a text, token ids, or a list of either. Not left to pydantic, which would report every item of a list."""
    several = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(several) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts")
    for prompt in several:
        ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not ids and not isinstance(prompt, str):
            raise ValueError("a string, a list of token ids, or a list of strings or of lists of token ids")
    return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in several)


class CompletionRequest(SamplingFields):
    """`/v1/completions`."""

    prompt: Annotated[Any, AfterValidator(prompts)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False
    add_special_tokens: bool = True
    best_of: Annotated[Any, Neutral((1,), "completions are not ranked")] = None
    suffix: Annotated[Any, Neutral(("",), "the models complete forwards only")] = None


class Hints(Body):
    """Fields of messages, their parts and calls that change no answer: how a provider caches them, and what it said of them before."""

    cache_control: Annotated[Any, Ignored(HINT)] = None
    prompt_cache_breakpoint: Annotated[Any, Ignored(HINT)] = None
    provider_specific_fields: Annotated[Any, Ignored(HINT)] = None
    extra_content: Annotated[Any, Ignored(HINT)] = None


class TextPart(Hints):
    """Text in a message's content."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    annotations: Annotated[Any, Ignored(HINT)] = None


class ImageUrl(Body):
    """`image_url` of a part."""

    url: Annotated[UrlText, PlainValidator(url_text)]
    detail: Detail | None = None
    format: Annotated[Any, Ignored(HINT)] = None


class ImagePart(Hints):
    """A picture in a message's content."""

    type: Literal["image_url"]
    image_url: ImageUrl
    uuid: Annotated[Any, Ignored(HINT)] = None


class VideoUrl(Body):
    """`video_url` of a part."""

    url: Annotated[UrlText, PlainValidator(url_text)]
    format: Annotated[Any, Ignored(HINT)] = None


class VideoPart(Hints):
    """A video in a message's content, as vLLM and SGLang have it; OpenAI's API has none."""

    type: Literal["video_url"]
    video_url: VideoUrl
    uuid: Annotated[Any, Ignored(HINT)] = None


_SHOWN = {"image_url": "ImagePart", "video_url": "VideoPart"}


def _kind_of_part(part: Any) -> str:
    return _SHOWN.get(str(part.get("type")), "TextPart") if isinstance(part, dict) else "TextPart"


Part = Annotated[
    Annotated[TextPart, Tag("TextPart")] | Annotated[ImagePart, Tag("ImagePart")] | Annotated[VideoPart, Tag("VideoPart")],
    Discriminator(_kind_of_part),
]


class CalledFunction(Hints):
    """A call in a message of the assistant."""

    name: str
    arguments: str | dict[str, Any] | None = ""
    parsed_arguments: Annotated[Any, Ignored(HINT)] = None


class CustomCall(Hints):
    """A call of a custom tool in a message of the assistant."""

    name: str
    input: str


class MessageToolCall(Hints):
    """A tool call in a message of the assistant."""

    function: CalledFunction | None = None
    custom: CustomCall | None = None
    id: str | None = None
    type: Literal["function", "custom"] = "function"
    index: int | None = None


class RequestMessage(Hints):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], FailFast()] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[MessageToolCall], FailFast()] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: Annotated[Any, Ignored(HINT)] = None
    reasoning_details: Annotated[Any, Ignored(HINT)] = None
    thinking_blocks: Annotated[Any, Ignored(HINT)] = None
    parsed: Annotated[Any, Ignored(HINT)] = None
    audio: None = None
    function_call: None = None


ChatTools = Annotated[tuple[Offer | LeftOut, ...], PlainValidator(read_chat_tools)]


class ChatRequest(SamplingFields):
    """`/v1/chat/completions`."""

    messages: Annotated[list[RequestMessage], Field(min_length=1), FailFast()]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: ChatTools = ()
    tool_choice: Annotated[ToolChoice | str | None, PlainValidator(read_choice)] = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    mm_processor_kwargs: ProcessorFields | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    separate_reasoning: bool = True
    include_reasoning: Annotated[Any, Neutral((True,), "separate_reasoning keeps it out of the answer")] = None
    add_special_tokens: Annotated[Any, Neutral((False,), "the chat template has them")] = None
    echo: Annotated[Any, Neutral((False,), "a chat's prompt is not repeated")] = None
    chat_template: Annotated[Any, Neutral((), "npucompile serve --chat-template FILE sets it")] = None
    documents: Annotated[Any, Neutral(([],), "templates are given no documents")] = None
    modalities: Annotated[Any, Neutral((["text"],), "the output is text")] = None
    audio: Annotated[Any, Neutral((), "the output is text")] = None
    prediction: Annotated[Any, Ignored("a hint for speed; drafts come from the model")] = None
    functions: Annotated[Any, Neutral(([],), "tools took their place")] = None
    function_call: Annotated[Any, Neutral(("none",), "tool_choice took its place")] = None
    service_tier: Annotated[Any, Ignored(FOR_THE_PROVIDER)] = None
    safety_identifier: Annotated[Any, Ignored(FOR_THE_PROVIDER)] = None
    prompt_cache_key: Annotated[Any, Ignored("a hint for caches")] = None
    prompt_cache_retention: Annotated[Any, Ignored("a hint for caches")] = None
    prompt_cache_options: Annotated[Any, Ignored("a hint for caches")] = None
    verbosity: Annotated[Any, Neutral(("medium",), "the models have no such setting")] = None
    web_search_options: Annotated[Any, Neutral((), "there is no web search")] = None
