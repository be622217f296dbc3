"""Completions of prompts: engine requests, and the text that their events become; no I/O, no clock."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...runtime.picture_spans import PictureInput
from ...runtime.request import Event, Request, Sampling, TokenEvent
from ..requests.generation_fields import GenerationFields
from ..requests.structured_output import OutputFormat
from ..text.tokenizer import TextTokenizer
from .output_stream import CompletionEnd, OutputStream, TextDelta

Output = tuple[int, TextDelta | CompletionEnd]
"""What became of one engine event: the index of the completion, and new text or its end."""


@dataclass(frozen=True)
class GenerationOptions:
    """How prompts are completed, whatever protocol asks for it.

    Attributes:
        max_tokens: None means as many as fit into the context.
        max_tokens_field: name of that field in the protocol, for errors.
        stop: strings that end the output and are not part of it.
        stop_token_ids: ids that end the output, beside the end-of-sequence ids.
        ignore_eos: generate past end-of-sequence tokens.
        logprobs: None for no log probabilities; else those of the output tokens and of this many most likely tokens at each position.
        logprobs_field: name of the field that set their number, for errors.
        prompt_logprobs: the same for tokens of the prompt, from position `prompt_logprobs_from` on.
        prompt_logprobs_field: name of the field that asked for these, for errors.
        n: completions of each prompt.
        speculative_tokens: draft tokens to verify per step, 0 for none; None means as many as the artifact was built for.
        skip_special_tokens: whether special tokens have no text.
        format: what the output must be; None leaves it free.
        priority: lower is served first.
        timeout_ms: how long it may wait and run; None is the server's own timeout.
        bad_words: texts that the output must not hold.
        min_tokens_field: name of the field that sets `sampling.min_tokens`, for errors.
        cache_salt, skip_reading_prefix_cache: as in `Request`.
    """

    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    logprobs_field: str = "top_logprobs"
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 1
    prompt_logprobs_field: str = "prompt_logprobs"
    n: int = 1
    speculative_tokens: int | None = None
    skip_special_tokens: bool = True
    format: OutputFormat | None = None
    priority: int = 0
    timeout_ms: float | None = None
    bad_words: tuple[str, ...] = ()
    min_tokens_field: str = "min_tokens"
    cache_salt: str = ""
    skip_reading_prefix_cache: bool = False

    @classmethod
    def of(cls, fields: GenerationFields, max_tokens: int | None, max_tokens_field: str) -> GenerationOptions:
        """What all bodies say in the same words."""
        return cls(
            max_tokens=max_tokens,
            max_tokens_field=max_tokens_field,
            stop=fields.stops,
            ignore_eos=fields.ignore_eos,
            n=fields.n,
            speculative_tokens=fields.speculative_tokens,
            priority=fields.priority,
            timeout_ms=fields.timeout_ms,
            bad_words=tuple(fields.bad_words),
            cache_salt=fields.cache_salt,
            skip_reading_prefix_cache=fields.skip_reading_prefix_cache,
        )


class Generation:
    """Completions that run together, from their submission to their ends.

    Args:
        requests: one per completion.
        tokenizer: of the model.
        stop: stop strings.
        skip_special: whether special tokens have no text.
        by_token: see `OutputStream`.

    Attributes:
        done: whether all completions have ended.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        tokenizer: TextTokenizer,
        stop: Sequence[str] = (),
        skip_special: bool = True,
        *,
        by_token: bool = False,
    ) -> None:
        self.requests = tuple(requests)
        self._index = {request.id: index for index, request in enumerate(requests)}
        self._streams = [
            OutputStream(tokenizer.detokenizer(skip_special=skip_special), stop, request.sampling.min_tokens, by_token=by_token)
            for request in requests
        ]
        self.done = not requests
        self._ends: dict[str, CompletionEnd] = {}
        self._stopped: list[str] = []

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of the requests that have not ended."""
        return tuple(request_id for request_id in self._index if request_id not in self._ends)

    @property
    def ends(self) -> tuple[CompletionEnd, ...]:
        """How the completions ended, in their order, once all have."""
        return tuple(self._ends[request_id] for request_id in self._index)

    def feed(self, event: Event) -> list[Output]:
        """What an engine event adds; nothing for a request that has ended."""
        if event.request_id in self._ends:
            return []
        index = self._index[event.request_id]
        stream = self._streams[index]
        if isinstance(event, TokenEvent):
            was_stopped = stream.stopped
            delta = stream.push(event)
            if stream.stopped and not was_stopped:
                self._stopped.append(event.request_id)
            return [(index, delta)] if delta else []
        last, end = stream.finish(event)
        if places := image_tokens(self.requests[index].pictures):
            end = replace(end, usage=replace(end.usage, image_tokens=places))
        self._ends[event.request_id] = end
        self.done = len(self._ends) == len(self._index)
        return [(index, last), (index, end)] if last else [(index, end)]

    def take_stopped(self) -> tuple[str, ...]:
        """Ids of the requests in which a stop string was found since the last call; the engine should cancel them."""
        if not self._stopped:
            return ()
        stopped, self._stopped = tuple(self._stopped), []
        return stopped


def image_tokens(pictures: Sequence[PictureInput]) -> int:
    """Tokens of a prompt that stand for its pictures."""
    return sum(picture.span.end - picture.span.first for picture in pictures)


def completion_id(base: str, index: int) -> str:
    """Id of a completion; the first has the id of its response."""
    return base if index == 0 else f"{base}_{index}"


def completion_seed(seed: int | None, index: int) -> int | None:
    """The seed of completion `index` of a response with `seed`.

    Completion 0 has the response's seed, so it equals a response with one completion. Completion i has the first 63 bits of the SHA-256
    of the text "<seed>/<i>", so that it can be reproduced alone. Without a seed the engine draws one for each completion.
    """
    if seed is None or index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "big") >> 1
