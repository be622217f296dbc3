"""What a server holds does not grow with the requests that it has served: no type has more objects after each further N of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import Counter

import httpx
from support.texts import byte_codec

from npucompile.graphs.errors import ProtocolError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.engine import Engine
from npucompile.runtime.scheduler import prefix_index
from npucompile.runtime.scheduler.kv_cache_manager import PrefixCacheSettings
from npucompile.server.client import Client
from npucompile.server.engine.service import ServedModel, Service
from npucompile.server.run import running

ROUNDS = 4
"""Of seven requests each."""


async def ask(url: str, number: int) -> None:
    """Requests of every kind: read to the end, cancelled, left, refused, over both protocols; prompts come again and again."""
    prompt = [1 + (number % 3) * 7 + place for place in range(20)]
    async with await Client.connect(url) as client:
        await client.create(prompt, max_output_tokens=6, store=False).completion()
        stream = await client.create(prompt, max_output_tokens=30, store=False, n=2).start()
        await anext(stream)
        await stream.cancel()
        async for _ in stream:
            pass
        async for _ in client.create([], store=False):
            pass
    left = await Client.connect(url)
    stream = await left.create(prompt, max_output_tokens=30, store=False).start()
    await anext(stream)
    left._websocket.transport.abort()
    with contextlib.suppress(ProtocolError):
        await left.close()
    http = url.replace("ws:", "http:").removesuffix("/v1/responses")
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0}
    async with httpx.AsyncClient(timeout=60) as client:
        assert (await client.post(f"{http}/v1/completions", json=body)).status_code == 200
        async with client.stream("POST", f"{http}/v1/completions", json={**body, "max_tokens": 30, "stream": True}) as answer:
            async for _ in answer.aiter_lines():
                break


def counted(engine: Engine) -> Counter[str]:
    """Objects by type, once nothing runs any more."""
    while engine.stats()["num_requests_running"] or engine.stats()["num_requests_waiting"]:
        time.sleep(0.01)
    # Sockets that were left are closed by the loop of the server, whose thread is another.
    time.sleep(0.5)
    gc.collect()
    counts: Counter[str] = Counter()
    for kind, count in Counter(map(type, gc.get_objects())).items():
        counts[f"{kind.__module__}.{kind.__qualname__}"] += count
    return counts


def test_objects_do_not_grow_with_requests(tiny_artifact, monkeypatch):
    # What other tests left is looked through no more.
    gc.collect()
    gc.freeze()
    # What was looked up in the prefix cache is remembered for a thousand requests, which are more than these.
    monkeypatch.setattr(prefix_index, "MOST_MATCHES", 4)
    # The prefix cache is bounded by tokens, which the first requests fill: its own bound is the pool's pages, which all of them do not.
    prefix_cache = PrefixCacheSettings(most_tokens=32)
    engine = Engine.from_loader(lambda: CpuExecutor(Artifact.open(tiny_artifact)), prefix_cache=prefix_cache, refresh_every_s=None)
    model = ServedModel("tiny", engine.executor.limits.max_model_len, engine.executor.vocab_size)
    counts: list[Counter[str]] = []
    try:
        with running(Service(engine, byte_codec(), model)) as server:
            for _ in range(4):
                for number in range(ROUNDS):
                    asyncio.run(ask(server.url, number))
                counts.append(counted(engine))
    finally:
        engine.stop(drain=False)
    # The first rounds fill the prefix cache, histograms and pools of threads. What is bounded may still vary (cancelled timers of a loop,
    # with their contexts, stay until there are a hundred); what is held for a round is ROUNDS more each time.
    _, first, second, third = counts
    grown = {name: (second[name] - first[name], third[name] - second[name]) for name in third}
    assert not {name: more for name, more in grown.items() if min(more) >= ROUNDS}
