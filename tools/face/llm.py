"""A model in this process: completions of prompts by the serving engine, whole, streamed or awaited."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Self, TypedDict, Unpack

from ...graphs.errors import RequestError
from ...runtime.delivery import BatchSink
from ...runtime.engine import Engine
from ...runtime.engine_groups import EngineGroups
from ...runtime.request import Event, ExecutionRecord, Logprobs, Request, Sampling
from ...runtime.scheduler.kv_cache_manager import PrefixCacheSettings
from ...server.engine.generation import Generation, GenerationOptions
from ...server.engine.output_stream import TextDelta
from ...server.engine.service import EngineClient
from ..cli import home_of_process
from ..progress import Progress
from ..ranks.environment import applied
from ..ranks.executors import AUTO, settled
from ..ranks.launch import opened_ranks
from ..ranks.rank_settings import SILENCE_MARGIN_S, RankSettings
from ..serve.checkpoint_texts import with_texts_of
from ..serve.serving import find_or_build, start_service

Prompt = str | Sequence[int]
"""Text, or token ids."""
Prompts = Prompt | Sequence[Prompt]


class GenerateOptions(TypedDict, total=False):
    """How completions end, and what is told of them.

    Attributes:
        max_tokens: most tokens to generate; by default as many as fit into the context.
        stop: string or strings that end the output and are not part of it.
        stop_token_ids: tokens that end the output, beside those of the checkpoint.
        ignore_eos: generate past the checkpoint's.
        logprobs: log probabilities of the chosen tokens, and of so many most likely ones beside each.
        speculative_tokens: most drafts to verify in a step; by default as many as were built for.
    """

    max_tokens: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    speculative_tokens: int | None


class Delta(NamedTuple):
    """What a step adds to a completion.

    Attributes:
        text: that later tokens cannot change.
        logprobs: one per token where they are asked for.
        finish_reason: of the last delta "stop" or "length", of the others None.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True)
class Completion:
    """A finished completion.

    Attributes:
        prompt_token_ids: of the prompt.
        token_ids: generated, without the one that ended the output.
        finish_reason: "stop" (a token or string that ends it) or "length".
        logprobs: one per token where they are asked for.
        record: how it was served: times, steps, drafts and cached tokens.
    """

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[Logprobs, ...]
    record: ExecutionRecord


class LLM:
    """A model that is loaded in this process; requests from any number of threads and event loops are batched together.

    What a server does, in one process without sockets: the same engine, executors, tokenizer and checks of requests. Close it when it is
    not needed any more, or use it in a `with`.

    Args:
        model: directory of an artifact, name of a built one, or a model: a preset, or the directory of a checkpoint. A model that is not
            built is built first, which takes minutes, with a progress bar.
        device: "auto", or "emulated" for an artifact for NPUs on this CPU.
        checkpoint: directory to read weights from in place of the one that an artifact for NPUs names.
        family: file of a family of your own.
        progress: whether standard error shows how far loading and generating are; a build always says it.

    Raises:
        NpucompileError: there is no such model, or it cannot be built or run here.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = AUTO,
        checkpoint: str | Path | None = None,
        family: str | None = None,
        progress: bool = True,
    ) -> None:
        self._progress, self._numbers = Progress(quiet=not progress), itertools.count()
        weights, home = None if checkpoint is None else Path(checkpoint), home_of_process()
        settings = RankSettings(device=device, checkpoint=weights, cache=home.cache)
        with ExitStack() as stack:
            artifact, build = find_or_build(home, str(model), settings, False, self._progress, family)
            if build:
                stack.callback(build.stop)
                artifact = build.wait_complete()
            settings = settled(artifact, settings)
            home = applied(home, artifact, settings, self._progress)
            artifact = with_texts_of(artifact, weights)
            engines = list[Engine | EngineGroups]()

            def ranks_failed(reason: str) -> None:
                for engine in engines:
                    engine.give_up(reason)

            load = stack.enter_context(opened_ranks(artifact, None, settings, home.environment, self._progress, ranks_failed))
            limit_s, prefixes = settings.step_limit_s + SILENCE_MARGIN_S, PrefixCacheSettings()
            running = start_service(artifact, load, step_limit_s=limit_s, prefix_cache=prefixes)
            engines.append(running.engine)
            stack.callback(running.engine.stop, drain=False)
            stack.push(running.closing)
            self._service, self._engine = running.service, running.engine
            self._stack = stack.pop_all()
        # Ranks of other processes must not outlive this one.
        atexit.register(self.close)

    def generate(self, prompts: Prompts, sampling: Sampling | None = None, **options: Unpack[GenerateOptions]) -> list[Completion]:
        """Completes prompts, batched together.

        Args:
            prompts: one or several, each text or token ids.
            sampling: how tokens are picked; greedily by default.
            options: of `GenerateOptions`.

        Returns:
            a completion for each prompt, in their order.

        Raises:
            RequestError: a prompt or an option is not legal, or the engine failed or was closed.
        """
        events, shown = SimpleQueue[Sequence[Event]](), Progress(quiet=self._progress.quiet or not sys.stderr.isatty())
        with self._begin(prompts, sampling, options, events.put) as running, shown.bar("generate", len(running.requests)) as bar:
            while not running.done:
                for delta in running.feed(events.get()):
                    if delta.finish_reason:
                        bar.step("")
        return running.completions

    def stream(self, prompt: Prompt, sampling: Sampling | None = None, **options: Unpack[GenerateOptions]) -> Iterator[Delta]:
        """Completes one prompt, and yields its text as it comes; leaving the loop cancels the rest.

        Args and Raises as `generate`.
        """
        events = SimpleQueue[Sequence[Event]]()
        with self._begin([prompt], sampling, options, events.put) as running:
            while not running.done:
                yield from running.feed(events.get())

    async def agenerate(self, prompts: Prompts, sampling: Sampling | None = None, **options: Unpack[GenerateOptions]) -> list[Completion]:
        """`generate`, while the event loop goes on."""
        events, put = _loop_queue()
        with self._begin(prompts, sampling, options, put) as running:
            while not running.done:
                for _ in running.feed(await events.get()):
                    pass
        return running.completions

    async def astream(self, prompt: Prompt, sampling: Sampling | None = None, **options: Unpack[GenerateOptions]) -> AsyncIterator[Delta]:
        """`stream`, while the event loop goes on."""
        events, put = _loop_queue()
        with self._begin([prompt], sampling, options, put) as running:
            while not running.done:
                for delta in running.feed(await events.get()):
                    yield delta

    def close(self) -> None:
        """Cancels what runs, and frees the model; what is asked for later is refused."""
        atexit.unregister(self.close)
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(
        self,
        prompts: Prompts,
        sampling: Sampling | None,
        options: GenerateOptions,
        put: Callable[[Sequence[Event]], object],
    ) -> _Running:
        """Submits prompts, all or none of them."""
        chosen, base = _options(sampling, options), next(self._numbers)
        requests = list[Request]()
        for number, prompt in enumerate(_several(prompts)):
            name = f"prompts[{number}]"
            ids = self._service.encode(prompt, name) if isinstance(prompt, str) else self._service.checked(_token_ids(prompt, name), name)
            requests += self._service.requests(f"llm-{base}-{number}", ids, chosen, name)
        running = _Running(self._engine, Generation(requests, self._service.tokenizer, chosen.stop), put)
        running.submit()
        return running


class _Running(BatchSink):
    """Requests from their submission to their ends; those that have not ended are cancelled on leaving.

    Args:
        put: takes the events of a step, on the engine's thread.
    """

    def __init__(self, engine: EngineClient, generation: Generation, put: Callable[[Sequence[Event]], object]) -> None:
        self._engine, self._put, self._left = engine, put, False
        self._generation, self.requests = generation, generation.requests
        self._deltas: list[list[TextDelta]] = [[] for _ in self.requests]

    def deliver(self, events: Sequence[Event]) -> None:
        """Events of one step."""
        if not self._left:
            self._put(events)

    @property
    def done(self) -> bool:
        """Whether none is live."""
        return self._generation.done

    @property
    def completions(self) -> list[Completion]:
        """All of them, in their order, once none is live."""
        completions = []
        for request, deltas, end in zip(self.requests, self._deltas, self._generation.ends, strict=True):
            token_ids = tuple(token for delta in deltas for token in delta.token_ids)
            logprobs = tuple(entry for delta in deltas for entry in delta.logprobs)
            text = "".join(delta.text for delta in deltas)
            completions.append(Completion(request.prompt, text, token_ids, end.reason, logprobs, end.usage.record))
        return completions

    def submit(self) -> None:
        """Submits all, or none where one is refused."""
        self._engine.hold()
        try:
            for request in self.requests:
                self._engine.submit(request, self)
        except BaseException:
            self._engine.cancel(*self._generation.live)
            raise
        finally:
            self._engine.release()

    def feed(self, events: Sequence[Event]) -> Iterator[Delta]:
        """What events add."""
        for event in events:
            for number, output in self._generation.feed(event):
                if isinstance(output, TextDelta):
                    self._deltas[number].append(output)
                    yield Delta(output.text, output.token_ids, output.logprobs)
                elif output.reason in ("stop", "length"):
                    yield Delta("", (), (), output.reason)
                else:
                    raise RequestError(f"prompts[{number}]: {output.message or output.reason}", code=output.code or output.reason)
            if stopped := self._generation.take_stopped():
                self._engine.cancel(*stopped)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # Nobody reads any more; an event loop may be closed.
        self._left = True
        if live := self._generation.live:
            self._engine.cancel(*live)


def _several(prompts: Prompts) -> Sequence[Prompt]:
    """One or several prompts as several; a list of token ids is one."""
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts is {prompts!r}; legal is text, a list of token ids, or a list of these", param="prompts")
    if isinstance(prompts, str) or (prompts and all(isinstance(part, int) for part in prompts)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _token_ids(prompt: Sequence[int], name: str) -> tuple[int, ...]:
    if not isinstance(prompt, Sequence) or not _integers(prompt):
        raise RequestError(f"{name} is {prompt!r}; legal is text or a list of token ids", param=name)
    return tuple(prompt)


def _integers(values: object) -> bool:
    return isinstance(values, Iterable) and all(type(value) is int for value in values)


def _options(sampling: Sampling | None, options: GenerateOptions) -> GenerationOptions:
    """How prompts are completed."""
    legal = GenerateOptions.__annotations__
    if strange := sorted(set(options) - set(legal)):
        raise RequestError(f"there is no option {', '.join(strange)}; legal are {', '.join(legal)}", param=strange[0])
    stop, ends = options.get("stop", ()), options.get("stop_token_ids", ())
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    rest: dict[str, Any] = {name: value for name, value in options.items() if name not in ("stop", "stop_token_ids")}
    for name, value in rest.items():
        if type(value) is not (bool if name == "ignore_eos" else int) and (name == "ignore_eos" or value is not None):
            wanted = "true or false" if name == "ignore_eos" else "a whole number, or None"
            raise RequestError(f"{name} is {value!r}; legal is {wanted}", param=name)
    if not all(isinstance(text, str) and text for text in stops):
        raise RequestError(f"stop is {stop!r}; legal is a string that is not empty, or several", param="stop")
    if not _integers(ends):
        raise RequestError(f"stop_token_ids is {ends!r}; legal are token ids", param="stop_token_ids")
    if sampling is not None and not isinstance(sampling, Sampling):
        raise RequestError(f"sampling is {sampling!r}; legal is a Sampling", param="sampling")
    return GenerationOptions(sampling=sampling or Sampling(), stop=stops, stop_token_ids=frozenset(ends), **rest)


def _loop_queue() -> tuple[asyncio.Queue[Sequence[Event]], Callable[[Sequence[Event]], object]]:
    """A queue of the running event loop, and what puts into it from any thread."""
    events, loop = asyncio.Queue[Sequence[Event]](), asyncio.get_running_loop()
    return events, lambda step: loop.call_soon_threadsafe(events.put_nowait, step)
