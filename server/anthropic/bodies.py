"""Bodies of Anthropic's requests (platform.claude.com/docs/en/api/messages)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ..requests.bodies import HINT, Body, FailFast, Ignored, Neutral
from ..requests.bounds import MAX_STOP_STRINGS
from ..requests.generation_fields import StopString
from ..requests.tool_fields import Effort

PROVIDER = "concerns the provider's bookkeeping"


class Hinted(Body):
    """What a provider would cache, or cite from."""

    cache_control: Annotated[Any, Ignored(HINT)] = None
    citations: Annotated[Any, Ignored(HINT)] = None


class Text(Hinted):
    """Text."""

    type: Literal["text"]
    text: str


class ImageData(Body):
    """Where a picture is: its bytes, or a URL of a host that the server may fetch from."""

    type: Literal["base64", "url"]
    media_type: str = "image/png"
    data: str = ""
    url: str = ""


class Image(Hinted):
    """A picture."""

    type: Literal["image"]
    source: ImageData


class ToolReference(Hinted):
    """A tool that a client's search has found; it is among `tools` from then on."""

    type: Literal["tool_reference"]
    tool_name: str


class ToolResult(Hinted):
    """What a call came to."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Text | Image | ToolReference] = ""
    is_error: Annotated[Any, Ignored("models read it in the text")] = None


class UsedTool(Hinted):
    """A call in a message of the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Annotated[Any, Ignored(HINT)] = None


class Thinking(Hinted):
    """Reasoning in a message of the assistant."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[Any, Ignored("reasoning is text here, which nothing signs")] = None


class Redacted(Hinted):
    """Reasoning that another provider has hidden: nothing of it is known."""

    type: Literal["redacted_thinking"]
    data: str = ""


def _type_of(block: Any) -> str:
    return str(block.get("type")) if isinstance(block, dict) else "text"


Block = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Image, Tag("image")]
    | Annotated[ToolResult, Tag("tool_result")]
    | Annotated[UsedTool, Tag("tool_use")]
    | Annotated[Thinking, Tag("thinking")]
    | Annotated[Redacted, Tag("redacted_thinking")],
    Discriminator(_type_of),
]


class Turn(Body):
    """A turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], FailFast()]


class ToolChoiceBody(Body):
    """Whether tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingConfig(Body):
    """Whether the model reasons first."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[Any, Ignored("reasoning ends where the model ends it, and max_tokens at the latest")] = None
    display: Annotated[Any, Ignored(HINT)] = None


class OutputConfig(Body):
    """How much it reasons, and the form of its answer."""

    effort: Effort | None = None
    format: dict[str, Any] | None = None


class CountRequest(Body):
    """`/v1/messages/count_tokens`."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1), FailFast()]
    system: str | Annotated[list[Text], FailFast()] = ""
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: Annotated[Any, Ignored(HINT)] = None
    context_management: Annotated[Any, Ignored("a conversation is what the client sends")] = None
    mcp_servers: Annotated[Any, Neutral(([],), "tools are the client's to call")] = None
    speed: Annotated[Any, Ignored(PROVIDER)] = None
    user_profile_id: Annotated[Any, Ignored(PROVIDER)] = None
    workspace_id: Annotated[Any, Ignored(PROVIDER)] = None


class MessagesRequest(CountRequest):
    """`/v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool = False
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), FailFast()] = Field(default_factory=list)
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    metadata: Annotated[Any, Ignored(PROVIDER)] = None
    service_tier: Annotated[Any, Ignored(PROVIDER)] = None
    inference_geo: Annotated[Any, Ignored(PROVIDER)] = None
    diagnostics: Annotated[Any, Ignored(PROVIDER)] = None
    container: Annotated[Any, Neutral((), "code runs nowhere here")] = None
