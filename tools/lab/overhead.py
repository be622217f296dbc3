"""Measures what a step costs beside the model: processor time of the engine's thread and of the event loop's, for steps that take no work.

The executor samples the same token for every row after a pause, so that neither thread waits for the other; clients read in a process of
their own.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...graphs.errors import NpucompileError, SpecError
from ...graphs.types import Bucket, Limits
from ...lowering.artifact.artifact import Artifact
from ...runtime.engine import Engine
from ...runtime.executor import FinishedStep, Inputs
from ...server.engine.service import ServedModel, Service
from ...server.run import serving
from ...server.text.tokenizer import TextTokenizer
from ..bench.report import Column, Table, Value
from ..bench.stats import spread
from ..progress import Progress
from ..serve.serving import calm_collector, tokenizer_of

STREAMS, TOKENS, VOCAB, LOGPROBS, PAUSE_S = 64, 200, 2048, 20, 0.02
PROMPT = [5, 6, 7]

COLUMNS = (
    Column("sockets", "sockets", 0),
    Column("top_logprobs", "log probabilities", 0),
    Column("engine_ms", "engine ms a step"),
    Column("server_ms", "server ms a step"),
    Column("event_us", "us an event", 1),
)

CASES = ((1, 0), (STREAMS, 0), (1, LOGPROBS))
"""Sockets that share the streams, and most likely tokens that each stream asks for."""

CLIENT = """
import asyncio, json, sys
from websockets.asyncio.client import connect

async def follow(url, streams, body):
    async with connect(url, compression=None, max_size=None, proxy=None) as socket:
        for i in range(streams):
            await socket.send(json.dumps({"type": "response.create", "stream_id": str(i), **body}))
        ended = 0
        while ended < streams:
            ended += '"type":"response.incomplete"' in (await socket.recv())[:60]

async def main(url, sockets, streams, body):
    await asyncio.gather(*(follow(url, int(streams), json.loads(body)) for _ in range(int(sockets))))

asyncio.run(main(*sys.argv[1:]))
"""


class IdleExecutor:
    """Takes `pause_s` and no processor time for a step; tokens are words of their own, so that each makes an event.

    Attributes:
        cpu_s: processor time of the engine's thread at the start of each decode step, and its live rows.
    """

    groups, run_ahead, max_ranked, recurrent = 1, 0, 0, False
    missing: Mapping[Bucket, str] = {}
    fixed_tokens: float | None = None
    vocab_size, max_logprobs = VOCAB, LOGPROBS

    def __init__(self, streams: int, token: int, pause_s: float = PAUSE_S) -> None:
        self.limits = Limits(16, streams * 32 + 1, streams + 1, 512)
        self.buckets = (Bucket("decode", streams, 1), Bucket("prefill", 1, 32))
        self.backends = {bucket.name: "idle" for bucket in self.buckets}
        self.cpu_s: list[tuple[float, int]] = []
        self._pause_s = pause_s
        self._outputs = {bucket: _outputs(bucket, token) for bucket in self.buckets}

    def launch(self, bucket: Bucket, inputs: Sequence[Inputs]) -> FinishedStep:
        """Runs nothing."""
        if bucket.kind == "decode":
            self.cpu_s.append((time.thread_time(), int((inputs[0]["request_slots"] > 0).sum())))
        time.sleep(self._pause_s)
        return FinishedStep([self._outputs[bucket]])

    def refresh(self) -> bool:
        """Nothing changes."""
        return False

    def give_back(self, numbers: Sequence[Mapping[str, Sequence[int]]]) -> None:
        """It has no memory."""

    def compiles(self) -> int:
        """None."""
        return 0


def _outputs(bucket: Bucket, token: int) -> dict[str, npt.NDArray[Any]]:
    B = bucket.batch
    outputs: dict[str, npt.NDArray[Any]] = {
        "tokens": np.full((B, 1), token, np.int32),
        "chosen_logprobs": np.full((B, 1), -1.5, np.float32),
        "top_ids": np.tile(np.arange(token, token + LOGPROBS, dtype=np.int32), (B, 1, 1)),
        "top_logprobs": np.tile(-1.2345 * np.arange(LOGPROBS, dtype=np.float32), (B, 1, 1)),
    }
    return outputs | ({"counts": np.ones(B, np.int32)} if bucket.kind == "decode" else {})


@dataclass(frozen=True)
class Cost:
    """Processor time of a step in which all streams had a token: of the engine's thread and of the event loop's."""

    engine_ms: float
    server_ms: float


def measure(
    tokenizer: TextTokenizer, sockets: int, top_logprobs: int, *, streams: int = STREAMS, tokens: int = TOKENS, pause_s: float = PAUSE_S
) -> Cost:
    """Serves streams that start together, and measures between an eighth and seven eighths of the steps of all of them.

    Raises:
        NpucompileError: the client failed, or there was no such step.
    """
    executor = IdleExecutor(streams, min(tokenizer.encode("a")[0], VOCAB - LOGPROBS), pause_s)
    engine = Engine(executor, refresh_every_s=None)
    engine.start()
    try:
        with serving(Service(engine, tokenizer, ServedModel("idle", 512, VOCAB, max_running=streams))) as url:
            loop = next(thread for thread in threading.enumerate() if thread.name == "npucompile-server")
            clock = time.pthread_getcpuclockid(loop.ident or 0)
            samples: list[tuple[int, float]] = []
            with _sampling(lambda: samples.append((len(executor.cpu_s), time.clock_gettime(clock)))):
                _follow(url, sockets, streams // sockets, tokens, top_logprobs)
    finally:
        engine.stop(drain=False)
    full = [step for step, (_, rows) in enumerate(executor.cpu_s) if rows == streams]
    inner = full[len(full) // 8 : -max(1, len(full) // 8)]
    server = [sample for sample in samples if inner and inner[0] <= sample[0] <= inner[-1]]
    if len(server) < 2 or server[0][0] == server[-1][0]:
        raise NpucompileError(f"{len(full)} steps had all {streams} streams; a measurement needs more: generate more than {tokens} tokens")
    first, last = executor.cpu_s[inner[0]], executor.cpu_s[inner[-1]]
    return Cost(1e3 * (last[0] - first[0]) / (inner[-1] - inner[0]), 1e3 * (server[-1][1] - server[0][1]) / (server[-1][0] - server[0][0]))


@contextlib.contextmanager
def _sampling(sample: Callable[[], None]) -> Iterator[None]:
    """Calls a function every 5 ms from a thread."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.005):
            sample()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _follow(url: str, sockets: int, streams: int, tokens: int, top_logprobs: int) -> None:
    body = {"input_token_ids": PROMPT, "max_output_tokens": tokens, "ignore_eos": True, "top_logprobs": top_logprobs or None}
    command = [sys.executable, "-c", CLIENT, url, str(sockets), str(streams), json.dumps(body)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise NpucompileError(f"the client of the benchmark ended with status {run.returncode}: {run.stderr.strip()[-2000:]}")


def overhead(artifact: Artifact, rounds: int, progress: Progress) -> Table:
    """What 64 streams cost beside the model, on one socket and on one each, without and with log probabilities.

    Raises:
        SpecError: the artifact has no tokenizer; nothing else of it matters.
    """
    tokenizer = tokenizer_of(artifact)
    if tokenizer is None:
        raise SpecError(f"{artifact.path} has no tokenizer; what a step costs beside the model is measured with text")
    calm_collector()
    rows: list[dict[str, Value]] = []
    with progress.bar("overhead", len(CASES)) as bar:
        for sockets, top_logprobs in CASES:
            costs = [measure(tokenizer, sockets, top_logprobs) for _ in range(rounds)]
            rows.append(
                {
                    "sockets": sockets,
                    "top_logprobs": top_logprobs,
                    "engine_ms": spread(cost.engine_ms for cost in costs),
                    "server_ms": spread(cost.server_ms for cost in costs),
                    "event_us": spread(1e3 * cost.server_ms / STREAMS for cost in costs),
                }
            )
            bar.step(f"{sockets} sockets, {top_logprobs} log probabilities")
    notes = (
        f"{STREAMS} streams of {TOKENS} tokens; processor time of a thread, of steps in which all streams get a token and an event; "
        f"medians (smallest..largest) of {rounds} rounds",
        f"steps take {1e3 * PAUSE_S:g} ms in which nothing runs; clients read in a process of their own",
    )
    return Table("overhead", "What a step costs beside the model", COLUMNS, tuple(rows), notes)
