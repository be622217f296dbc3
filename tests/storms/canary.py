"""A stream beside a storm, read in a process of its own: how long it pauses, and whether its tokens are right.

As a program it reads one request after another until its standard input ends, and writes what it found as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from storms.jobs import Job, over_websocket
from storms.target import Target

from npucompile.server.client import Client


@dataclass
class Calm:
    """What a canary found.

    Attributes:
        pauses_ms: between two arrivals of a stream, and from asking to the first; in order.
        delays_ms: for how much of each the canary's own process could run and had no processor.
        ends_s: when each ended, on the machine's monotonic clock.
        first: whether it was that from asking to the first arrival.
        wrong: outputs that were not what the request gives alone.
    """

    pauses_ms: list[float] = field(default_factory=list)
    delays_ms: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    first: list[bool] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@contextlib.asynccontextmanager
async def watched(target: Target, job: Job) -> AsyncIterator[Calm]:
    """A canary for the length of a `with`; at its end the record is filled."""
    command = (sys.executable, __file__, json.dumps(asdict(target)), json.dumps(asdict(job)))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=2**28)
    assert process.stdin is not None
    assert process.stdout is not None
    await process.stdout.readline()
    calm = Calm()
    try:
        yield calm
    finally:
        process.stdin.close()
        output = await process.stdout.read()
        assert await process.wait() == 0
        vars(calm).update(json.loads(output))


async def watch(target: Target, job: Job) -> Calm:
    """Reads until standard input ends."""
    calm, done = Calm(), asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    async with await Client.connect(target.websocket) as client:
        print("ready", flush=True)
        while not done.done():
            tokens: list[int] = []
            last, waited = time.monotonic(), _waited_s()
            async for arrived in over_websocket(client, job):
                now, delayed = time.monotonic(), _waited_s()
                calm.pauses_ms.append((now - last) * 1e3)
                calm.delays_ms.append((delayed - waited) * 1e3)
                calm.ends_s.append(now)
                calm.first.append(not tokens)
                last, waited = now, delayed
                tokens += arrived
            if tuple(tokens) != job.expected:
                calm.wrong.append(f"beside the storm {tokens} instead of {list(job.expected)}")
    return calm


def _waited_s() -> float:
    """For how long this thread was ready to run and another ran."""
    return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9


def _job(fields: dict[str, Any]) -> Job:
    return Job(tuple(fields["prompt"]), fields["max_tokens"], fields["sampling"], tuple(fields["expected"]))


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(watch(Target(**json.loads(sys.argv[1])), _job(json.loads(sys.argv[2])))))))
