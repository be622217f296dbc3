"""Answers `npucompile bench` for one engine, in JSON lines: `python -I loop.py ADAPTER.py`, by the interpreter the engine is installed in.

This file and the adapters need nothing but the standard library and their engine, of Python 3.10 or later. An adapter defines
`open_engine`; the file says what a request and an answer hold.

Lines from the child: {"version": str} once the engine is imported, or {"missing": str}; then one for every request.
{"do": "load", "model": str, "dtype": "bf16", "threads": 2, "max_model_len": 576, "max_num_seqs": 16} -> {"loaded": str}
{"do": "settle"} -> {}, once an engine that goes on working by itself after a load, and so has such a method, has done that
{"do": "generate", "prompts": [[int]], "tokens": int} -> `ArrivalTimes.report`
A request that fails is answered with {"error": str, "trace": str}.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TextIO

PR_SET_PDEATHSIG = 1


class Emit(Protocol):
    """Is told of tokens as they arrive."""

    def __call__(self, stream: int, token_ids: Sequence[int], /) -> None:
        """Takes the next tokens of a stream, from 0."""


class PeerEngine(Protocol):
    """An engine, imported."""

    version: str

    def load(self, model: str, dtype: str, threads: int, max_model_len: int, max_num_seqs: int) -> str:
        """Gets ready to serve; returns how, in a few words (precision, way of batching)."""

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, emit: Emit) -> None:
        """Continues all prompts greedily past the end of text."""


class ArrivalTimes:
    """When the tokens of every stream arrived.

    Args:
        streams: number of streams.
        clock: in seconds.
    """

    def __init__(self, streams: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._tokens: list[list[int]] = [[] for _ in range(streams)]
        self._times: list[list[float]] = [[] for _ in range(streams)]
        self._began = clock()

    def __call__(self, stream: int, token_ids: Sequence[int]) -> None:
        """Takes the next tokens of a stream."""
        self._tokens[stream] += token_ids
        self._times[stream] += [self._clock() - self._began] * len(token_ids)

    def report(self, tokens: int) -> dict[str, Any]:
        """The answer to a request.

        Returns:
            `token_ids` of each stream; `prefill_s` until every stream had its first token; `decode_s` from then to the last token;
            `decoded`, the number of tokens that arrived in that time.

        Raises:
            ValueError: a stream has another number of tokens.
        """
        counts = [len(stream) for stream in self._tokens]
        if any(count != tokens for count in counts):
            raise ValueError(f"streams brought {counts} tokens; each was asked for {tokens}")
        prefill_s = max(times[0] for times in self._times)
        last_s = max(times[-1] for times in self._times)
        decoded = sum(at > prefill_s for times in self._times for at in times)
        return {"token_ids": self._tokens, "prefill_s": prefill_s, "decode_s": last_s - prefill_s, "decoded": decoded}


def answer(engine: PeerEngine, request: Mapping[str, Any]) -> dict[str, Any]:
    """Serves one request.

    Raises:
        ValueError: it asks for something else.
    """
    arguments = {key: value for key, value in request.items() if key != "do"}
    if request["do"] == "load":
        return {"loaded": engine.load(**arguments)}
    if request["do"] == "settle":
        getattr(engine, "settle", lambda: None)()
        return {}
    if request["do"] == "generate":
        watch = ArrivalTimes(len(arguments["prompts"]))
        engine.generate(arguments["prompts"], arguments["tokens"], watch)
        return watch.report(arguments["tokens"])
    raise ValueError(f"the request is to {request['do']!r}; legal are load, settle and generate")


def talk(open_engine: Callable[[], PeerEngine]) -> None:
    """Answers until standard input ends. Whatever the engine prints goes to standard error."""
    end_with_parent()
    with private_stdout() as out:

        def say(line: Mapping[str, Any]) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()

        try:
            engine = open_engine()
        except ImportError as error:
            say({"missing": str(error)})
            return
        say({"version": engine.version})
        for line in sys.stdin:
            try:
                say(answer(engine, json.loads(line)))
            except Exception as error:  # an engine may raise anything, and the parent has a row for it
                say({"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})


@contextmanager
def private_stdout() -> Iterator[TextIO]:
    """The standard output of this process; everyone else's, C libraries included, becomes standard error."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        yield out


def end_with_parent() -> None:
    """Asks the kernel to end this process with its parent, since a stopped process would never notice. Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(path: str) -> None:
    """Loads an adapter by its path: the names of adapters are those of engines, which must not hide them from `import`."""
    spec = importlib.util.spec_from_file_location("adapter", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    adapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapter)
    talk(adapter.open_engine)


if __name__ == "__main__":
    main(sys.argv[1])
