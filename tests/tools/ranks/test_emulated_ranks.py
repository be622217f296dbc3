"""Four emulated ranks of a mixture of experts, as processes behind a server: they answer as one device does, and failures are named."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from support.served import compare

from npucompile.graphs.errors import RequestError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.server.client import Client

MESH = "dp=2,tp=2"
PROMPTS = [[1, 2, 3], [9] * 6, list(range(20, 31)), [0], [255, 7]]
"""Over two groups of two rows each, so that one waits for a row and the shares are uneven."""

TOKENS = 12
STEP_TIMEOUT_S = 6


@pytest.fixture(scope="module")
def path(npu_artifact):
    return npu_artifact(MESH)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Of all servers, so that the second one finds the graphs that the first one compiled."""
    return tmp_path_factory.mktemp("home")


async def interrupted(server, act, tokens=100):
    """Starts a stream for each prompt, calls `act` once all have had tokens, and returns how each stream ends."""
    async with await Client.connect(server.url) as client:
        streams = [client.create(prompt, max_output_tokens=tokens, ignore_eos=True) for prompt in PROMPTS[:4]]

        async def first(stream):
            async for event in stream:
                if event["type"] == "response.output_text.delta":
                    return

        await asyncio.gather(*map(first, streams))
        act()
        return await asyncio.gather(*(stream.completion() for stream in streams), return_exceptions=True)


def test_streams_are_what_one_device_generates_and_a_killed_rank_is_named_in_all_of_them(server, path, home):
    four = server(path, "--device", "emulated", home=home)
    assert f"4 ranks of mesh {MESH}, a process each" in four.output
    assert four.output.count(" s, compiled, ") == 3

    async def ask_all():
        return await asyncio.gather(*(four.ask(TOKENS, prompt) for prompt in PROMPTS))

    checkpoint = Path(Artifact.open(path).manifest.build_arguments[0])
    served = asyncio.run(ask_all())
    agreements = [compare(checkpoint, "none", prompt, tokens) for prompt, tokens in zip(PROMPTS, served, strict=True)]
    assert [len(tokens) for tokens in served] == [TOKENS] * len(PROMPTS)
    assert [agreement.wrong for agreement in agreements] == [()] * len(PROMPTS)
    assert sum(sum(agreement.decided) for agreement in agreements) >= 20
    metrics = four.metrics()
    assert "npucompile:compiles_after_ready_total 0.0\n" in metrics
    assert f'npucompile:requests_finished_total{{reason="length"}} {float(len(PROMPTS))}\n' in metrics
    assert 'npucompile:bucket_steps_total{bucket="decode-b2-q2"}' in metrics
    victim = four.others[2]
    ends = asyncio.run(interrupted(four, lambda: os.kill(victim, signal.SIGKILL)))
    died = f"rank 3 of mesh {MESH} died: process {victim} was killed by signal 9 (SIGKILL); all ranks end"
    assert [type(end) for end in ends] == [RequestError] * len(ends)
    assert all(died in str(end) for end in ends)
    status, output = four.ended(15)
    # Those that lost their neighbour say so before.
    assert (status, output.splitlines()[-1]) == (1, f"Error: {died}")
    assert not any(os.path.exists(f"/proc/{pid}") for pid in four.others)


@pytest.mark.long
def test_a_rank_that_hangs_in_a_step_is_named_within_the_step_timeout(server, path, home):
    four = server(path, "--device", "emulated", "--step-timeout", STEP_TIMEOUT_S, home=home)
    assert four.output.count(" s, cached, ") == 3
    ends = asyncio.run(interrupted(four, lambda: os.kill(four.others[1], signal.SIGSTOP)))
    lost = f"rank 2 of mesh {MESH} was lost: it has been silent for"
    assert [isinstance(end, RequestError) and lost in str(end) for end in ends] == [True] * len(ends), ends
    status, output = four.ended(20)
    assert status == 1
    assert lost in output
    assert not any(os.path.exists(f"/proc/{pid}") for pid in four.others)
