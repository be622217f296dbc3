"""tools/bench/serve/websocket.py: usage becomes counts, and a server that is not there an error; test_bench_serve.py has a server."""

from __future__ import annotations

import asyncio

import pytest

from npucompile.graphs.errors import NpucompileError
from npucompile.tools.bench.serve.outcome import ServerWord
from npucompile.tools.bench.serve.websocket import SocketTarget, Websocket, told
from npucompile.tools.bench.serve.workload import WorkloadPrompt


def test_our_own_record_is_read() -> None:
    record = {"queue_ms": 1.5, "first_token_ms": 2.5, "verify_steps": 4, "accepted_per_position": [3, 1]}
    usage = {"input_tokens": 7, "output_tokens": 9, "input_tokens_details": {"cached_tokens": 6}, "npucompile": record}
    assert told(usage) == ServerWord(7, 9, 6, 1.5, 2.5, 4, 4)
    assert told({**usage, "npucompile": {"completions": [record]}}) == ServerWord(7, 9, 6)
    assert told({}) == ServerWord()


def test_a_websocket_that_is_not_there_is_an_error() -> None:
    async def send() -> None:
        async with Websocket(SocketTarget("http://127.0.0.1:9", "stub", True, None, {})) as sender:
            await sender.send(WorkloadPrompt((104, 105, 33), 5), lambda _: None)

    with pytest.raises(NpucompileError, match=r"cannot connect to ws://127\.0\.0\.1:9/v1/responses"):
        asyncio.run(send())
