"""tools/bench/serve/apart.py: a client of its own process that is refused or ends is an error; test_streams.py has a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from npucompile.graphs.errors import NpucompileError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.server.run import serving
from npucompile.tools.bench.serve.apart import ApartClient
from npucompile.tools.serve.serving import start_service


@pytest.fixture
def client(tiny_artifact: Path) -> Iterator[ApartClient]:
    artifact = Artifact.open(tiny_artifact)
    started = start_service(artifact, lambda: CpuExecutor(artifact))
    try:
        with serving(started.service) as url, ApartClient(url) as process:
            yield process
    finally:
        started.engine.stop(drain=False)


def test_a_refused_request_and_a_client_that_ends_are_errors(client: ApartClient) -> None:
    outcomes = client.serve([[1, 2, 3], [4, 5]], 4)
    assert [(outcome.prompt_tokens, len(outcome.token_ids)) for outcome in outcomes] == [(3, 4), (2, 4)]
    assert all(0 < outcome.arrivals[0].s <= outcome.ended_s for outcome in outcomes)
    with pytest.raises(NpucompileError, match="the server refused a request of the benchmark: "):
        client.serve([[1] * 60], 60)
    client._process.kill()
    with pytest.raises(NpucompileError, match="the client of the benchmark ended with status -9"):
        client.serve([[1]], 1)
