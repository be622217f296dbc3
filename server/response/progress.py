"""One response: its engine requests, and the server events that their engine events become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ...runtime.request import Event, Request
from ..engine.generation import Generation, completion_id
from ..engine.output_stream import CompletionEnd, TextDelta
from ..parsers.message import MessageParser
from ..requests.items import Item
from ..requests.tool_fields import Declared
from ..text.logprobs import token_objects
from ..text.tokenizer import TextTokenizer
from .events import ResponseEvents, ResponseInfo, ServerEvent
from .output_items import EventBody, MessageItem
from .output_writer import OutputWriter, PartsWriter, TextWriter


@dataclass(frozen=True)
class PreparedResponse:
    """A validated response that has not been submitted.

    Attributes:
        info: fields that its events repeat.
        requests: engine requests, one per completion.
        stop: stop strings.
        items: the conversation before its output; None for a prompt of token ids.
        parser: makes a parser of the text of a single completion; None leaves it one message.
        skip_special: whether special tokens have no text.
        declared: what the client calls functions that are none to it.
        generates: whether there is an output; else the prompt is computed, and the one token behind it left out. Without requests
            there is nothing to compute.
    """

    info: ResponseInfo
    requests: tuple[Request, ...]
    stop: tuple[str, ...] = ()
    items: tuple[Item, ...] | None = ()
    generates: bool = True
    parser: Callable[[], MessageParser] | None = field(default=None, compare=False)
    skip_special: bool = True
    declared: Mapping[str, Declared] = field(default_factory=dict)


class Response:
    """One response from acceptance to its last event; no I/O, no clock.

    Attributes:
        done: whether the last event has been returned.
    """

    def __init__(self, prepared: PreparedResponse, tokenizer: TextTokenizer) -> None:
        self._writers = _writers(prepared)
        self._events = ResponseEvents(prepared.info, self._writers)
        self._tokenizer = tokenizer
        self._generates = prepared.generates
        by_token = prepared.parser is not None
        self._generation = generation = Generation(prepared.requests, tokenizer, prepared.stop, prepared.skip_special, by_token=by_token)
        self.done = generation.done

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of the requests that have not ended."""
        return self._generation.live

    def begin(self) -> list[ServerEvent]:
        """The events that open the response, once the engine has accepted its requests; all of them where there are no requests."""
        return self._events.begin() + (self._events.end(()) if self.done else [])

    def snapshot(self) -> EventBody:
        """The response object as it is now."""
        return self._events.snapshot()

    def fail(self, error: Exception) -> ServerEvent:
        """The last event where the server failed to make others; from then on `snapshot` is its response."""
        return self._events.fail(error)

    def items(self) -> tuple[Item, ...]:
        """What a single completion adds to the conversation."""
        return self._writers[0].items() if self._generates and self._writers else ()

    def feed(self, event: Event) -> list[ServerEvent]:
        """The server events for one engine event."""
        events: list[ServerEvent] = []
        for index, output in self._generation.feed(event):
            if isinstance(output, TextDelta):
                if self._generates:
                    text, token_ids, logprobs, _, pieces = output
                    objects = token_objects(self._tokenizer.token_text, token_ids, logprobs) if logprobs else ()
                    events += self._events.delta(index, pieces or (text,), token_ids, objects)
                continue
            self.done = self._generation.done
            if not self._generates:
                events += self._events.end([prepared_end(output)])
                continue
            events += self._events.close(index, output.status)
            if self.done:
                events += self._events.end([self._counted(place, end) for place, end in enumerate(self._generation.ends)])
        return events

    def take_stopped(self) -> tuple[str, ...]:
        """Ids of the requests in which a stop string was found since the last call; the engine should cancel them."""
        return self._generation.take_stopped()

    def _counted(self, index: int, end: CompletionEnd) -> CompletionEnd:
        return replace(end, usage=replace(end.usage, reasoning_tokens=self._writers[index].reasoning_tokens))


def prepared_end(end: CompletionEnd) -> CompletionEnd:
    """The end of a completion whose output is left out: a limit of one token is no reason to call it incomplete."""
    reason = "stop" if end.reason == "length" else end.reason
    return replace(end, reason=reason, usage=replace(end.usage, output_tokens=0))


def _writers(prepared: PreparedResponse) -> list[OutputWriter]:
    base = prepared.info.response_id.removeprefix("resp_")
    if prepared.parser is not None:
        return [PartsWriter(base, prepared.parser(), prepared.declared)]
    count = len(prepared.requests) or 1
    return [TextWriter(MessageItem(completion_id(f"msg_{base}", index), index), count == 1) for index in range(count)]
