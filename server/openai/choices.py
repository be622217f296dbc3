"""What `/v1/completions` and `/v1/chat/completions` have in common: pieces of choices, chunks, usage, and the end of a stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from ..engine.generation import Output
from ..engine.output_stream import CompletionEnd, TextDelta, Usage
from ..requests.error_objects import failure_of
from .errors import EngineTimeout, failure
from .sse import DONE, Frames, failure_frames, frame

FINISH_REASONS: Mapping[str, str] = {"stop": "stop", "length": "length", "cancelled": "abort", "timeout": "timeout"}
"""OpenAI's names of the engine's finish reasons; vLLM's for a request that was aborted, and one of our own."""


class UsageWanted(Enum):
    """Where a stream has its usage: in a last chunk of its own, as OpenAI's do, or as vLLM's so far in each chunk, too."""

    NOWHERE = 0
    LAST = 1
    EACH = 2


class Piece(NamedTuple):
    """New text of a choice, its end, or both."""

    choice: int
    delta: TextDelta | None
    end: CompletionEnd | None


def pieces(outputs: Sequence[Output]) -> Iterator[Piece]:
    """Outputs, with an end beside the text that it came with: what counts chunks counts no empty one."""
    last: Piece | None = None
    for index, output in outputs:
        if isinstance(output, TextDelta):
            if last is not None:
                yield last
            last = Piece(index, output, None)
        elif last is not None and last.choice == index:
            yield Piece(index, last.delta, output)
            last = None
        else:
            if last is not None:
                yield last
                last = None
            yield Piece(index, None, output)
    if last is not None:
        yield last


class Choice(Protocol):
    """One completion on its way to the client."""

    def chunk(self, delta: TextDelta | None, end: CompletionEnd | None) -> Mapping[str, Any] | None:
        """The next entry of a chunk's `choices`; None where there is nothing to tell yet."""

    def whole(self) -> Mapping[str, Any]:
        """The entry of the whole answer's `choices`, once it has ended."""


@dataclass(frozen=True)
class Header:
    """Fields that an answer and all its chunks have.

    Attributes:
        object: of an answer; chunks of a chat have another.
        warnings: what of the request its prompt does not have (`requests.left_out`); an answer has them, and the first chunk.
    """

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None
    chunk_object: str
    warnings: Sequence[Mapping[str, str]] = ()

    def of(self, kind: str) -> dict[str, Any]:
        """The fields, with `object` of that kind."""
        fields = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return fields | ({"system_fingerprint": self.system_fingerprint} if self.system_fingerprint else {})


@dataclass
class ChunkFrames(Frames[Output]):
    """The chunks of a stream.

    Attributes:
        n: choices of each prompt.
        usage: where the stream has its usage.
        prompts: tokens of the prompt of each choice.
    """

    header: Header
    choices: Sequence[Choice]
    n: int
    usage: UsageWanted
    prompts: Sequence[int]
    failed: bool = False
    _ends: dict[int, CompletionEnd] = field(default_factory=dict)
    _warned: bool = False
    _tokens: Counter[int] = field(default_factory=Counter)

    def feed(self, outputs: Sequence[Output]) -> list[bytes]:
        frames: list[bytes] = []
        for index, delta, end in pieces(outputs):
            if end is not None and end.reason == "error":
                self.failed = True
                return [*frames, *failure_frames(end.message, end.code)]
            self._tokens[index] += len(delta.token_ids) if delta else 0
            if end is not None:
                self._ends[index], self._tokens[index] = end, end.usage.output_tokens
            choice = self.choices[index].chunk(delta, end)
            if choice is not None:
                frames.append(self._chunk([choice], self._so_far(index) if self.usage is UsageWanted.EACH else None))
        return frames

    def _so_far(self, index: int) -> dict[str, int]:
        """The usage of a choice until now."""
        prompt, output = self.prompts[index], self._tokens[index]
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def end(self) -> list[bytes]:
        late = [end for end in self._ends.values() if end.reason == "timeout"]
        if late:
            return failure_frames(late[0].message, "timeout")
        if self.usage is UsageWanted.NOWHERE:
            return [DONE]
        usages = [self._ends[index].usage for index in range(len(self.choices))]
        return [self._chunk([], usage_object(usages, self.n)), DONE]

    def _chunk(self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any] | None = None) -> bytes:
        body = {**self.header.of(self.header.chunk_object), "choices": choices}
        if self.header.warnings and not self._warned:
            body["warnings"], self._warned = self.header.warnings, True
        return frame(body if self.usage is UsageWanted.NOWHERE else {**body, "usage": usage})


def check_in_time(ends: Collection[CompletionEnd]) -> None:
    """Raises EngineTimeout where completions ran out of time and none of them has anything to show."""
    late = [end for end in ends if end.reason == "timeout"]
    if late and not any(end.usage.output_tokens for end in ends):
        raise EngineTimeout(failure_of(late[0].message))


def whole_answer(header: Header, choices: Sequence[Choice], n: int, outputs: Sequence[Output]) -> dict[str, Any]:
    """The answer to a request that does not stream.

    Raises:
        EngineFailure: a completion failed.
    """
    ends: dict[int, CompletionEnd] = {}
    for index, delta, end in pieces(outputs):
        choices[index].chunk(delta, end)
        if end is not None:
            ends[index] = end
            if end.reason == "error":
                raise failure(end)
    check_in_time(ends.values())
    usage = usage_object([ends[index].usage for index in range(len(choices))], n)
    warnings = {"warnings": header.warnings} if header.warnings else {}
    return {**header.of(header.object), "choices": [choice.whole() for choice in choices], "usage": usage, **warnings}


def usage_object(completions: Sequence[Usage], n: int = 1) -> dict[str, Any]:
    """The usage of a request.

    Args:
        completions: of each prompt `n`, one after another. A prompt counts once.
    """
    prompts = [completions[first : first + n] for first in range(0, len(completions), n)]
    prompt_tokens = sum(several[0].input_tokens for several in prompts)
    output_tokens = sum(usage.output_tokens for usage in completions)
    # What a stop string or a limit cut off was accepted, and is not in the output.
    image_tokens = sum(several[0].image_tokens for several in prompts)
    accepted = sum(min(usage.output_tokens, sum(usage.record.accepted_per_position)) for usage in completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(min(usage.record.cached_tokens for usage in several) for several in prompts)}
        | ({"image_tokens": image_tokens, "text_tokens": prompt_tokens - image_tokens} if image_tokens else {}),
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(usage.record.drafted_tokens for usage in completions) - accepted,
        },
    }
