"""A load generator in a process of its own, beside the process that measures: `python -m npucompile.tools.bench.serve.apart URL [http]`.

It reads a load a line, {"prompts": token ids [requests][tokens], "tokens": of each output}, and answers a line, the list of outcomes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ....graphs.errors import NpucompileError
from .drive import drive
from .http_streams import HttpStreams
from .outcome import Arrival, ServerWord, StreamOutcome
from .websocket import SocketTarget, Websocket
from .workload import WorkloadPrompt


class ApartClient:
    """The process; its connections stay open from one load to the next.

    Args:
        url: of the server's websocket.
        http: streams are over HTTP, a connection each.
    """

    def __init__(self, url: str, *, http: bool = False) -> None:
        command = [sys.executable, "-m", __name__, url, *(["http"] if http else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> ApartClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def serve(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[StreamOutcome, ...]:
        """Sends greedy requests that start together and run to so many tokens each.

        Raises:
            NpucompileError: the server refused or failed a request, or the client ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # One that has ended answers nothing.
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"prompts": prompts, "tokens": tokens}), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise NpucompileError(f"the client of the benchmark ended with status {self._process.wait()}; it said why above")
        outcomes = tuple(map(_read, json.loads(answer)))
        if failed := [outcome.error for outcome in outcomes if outcome.error is not None]:
            raise NpucompileError(f"the server refused a request of the benchmark: {failed[0]}")
        if any(len(outcome.token_ids) != tokens for outcome in outcomes):
            raise NpucompileError(f"streams brought {[len(o.token_ids) for o in outcomes]} tokens; each was asked for {tokens}")
        return outcomes


def _read(fields: dict[str, Any]) -> StreamOutcome:
    arrivals, token_ids = tuple(Arrival(*arrival) for arrival in fields["arrivals"]), tuple(fields["token_ids"])
    return StreamOutcome(**fields | {"told": ServerWord(**fields["told"]), "arrivals": arrivals, "token_ids": token_ids})


async def answer(url: str, http: bool) -> None:
    """Answers loads until there are no more."""
    base_url = url.replace("ws", "http", 1).removesuffix("/v1/responses")
    async with (HttpStreams if http else Websocket)(SocketTarget(base_url, "", True, None, {})) as sender:
        while line := await asyncio.to_thread(sys.stdin.readline):
            load = json.loads(line)
            prompts = [WorkloadPrompt(tuple(token_ids), load["tokens"]) for token_ids in load["prompts"]]
            outcomes = await drive(sender, prompts, (0.0,) * len(prompts))
            print(json.dumps([asdict(outcome) for outcome in outcomes]), flush=True)


if __name__ == "__main__":
    asyncio.run(answer(sys.argv[1], sys.argv[2:] == ["http"]))
