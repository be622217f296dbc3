"""tools/bench/serve/http_streams.py: HTTP brings the tokens that the websocket brings, and refusals are outcomes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.server.run import serving
from npucompile.tools.bench.serve.drive import drive
from npucompile.tools.bench.serve.http_streams import HttpStreams
from npucompile.tools.bench.serve.websocket import SocketTarget, Websocket
from npucompile.tools.bench.serve.workload import WorkloadPrompt
from npucompile.tools.serve.serving import start_service

PROMPTS = [WorkloadPrompt((1, 2, 3), 8), WorkloadPrompt((4, 5), 5), WorkloadPrompt((6,), 3)]


def test_streams_over_http_bring_what_websockets_bring(tiny_artifact: Path) -> None:
    artifact = Artifact.open(tiny_artifact)
    started = start_service(artifact, lambda: CpuExecutor(artifact))

    async def run(url: str) -> None:
        target = SocketTarget(url.replace("ws", "http", 1).removesuffix("/v1/responses"), "", True, None, {})
        async with HttpStreams(target) as http, Websocket(target) as websocket:
            outcomes = [await drive(sender, PROMPTS, (0.0,) * 3) for sender in (http, websocket, http)]  # type: ignore[arg-type]
            # The connections of the first load are those of the last.
            assert len(http._idle) == 3
            assert [[outcome.token_ids for outcome in each] for each in outcomes] == [[o.token_ids for o in outcomes[1]]] * 3
            assert [outcome.told.output_tokens for outcome in outcomes[0]] == [8, 5, 3]
            (refused,) = await drive(http, [WorkloadPrompt((1,) * 60, 60)], (0.0,))
            assert refused.error is not None
            assert "answers with status 400" in refused.error

    try:
        with serving(started.service) as url:
            asyncio.run(run(url))
    finally:
        started.engine.stop(drain=False)
