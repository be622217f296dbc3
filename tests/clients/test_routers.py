"""Routers that nobody here wrote, unchanged, in front of the bundled model.

routed.json has the bodies that they made of plain ones of clients (recorded from the programs, with a server that writes down what it is
sent): each is answered. The programs themselves run where `make clients` installed them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI, OpenAIError, Stream
from openai.types import Completion
from support import bundled, optional, ranks, tiny
from support.servers import Server

BODIES = json.loads(Path(__file__).with_name("routed.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    out = tmp_path_factory.mktemp("routers") / "tiny"
    sizes = {"buckets": (4,), "prefill": (32,), "max_model_len": 256, "max_logprobs": 2}
    with bundled.served(out, tool_call_parser="hermes", **sizes) as (url, _):
        yield url


@pytest.mark.parametrize("entry", BODIES, ids=lambda entry: f"{entry['router']} {entry['path']}")
def test_bodies_that_routers_made_are_answered(url, entry):
    answer = httpx.post(url + entry["path"], json=entry["body"], timeout=60)
    assert answer.status_code == 200, answer.text
    streams = bool(entry["body"].get("stream"))
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")] if streams else [answer.json()]
    assert not any(event.get("error") for event in events), answer.text
    last = next(event for event in reversed(events) if event.keys() & {"usage", "meta_info", "response", "tokens", "choices"})
    if "meta_info" in last:
        assert last["meta_info"]["completion_tokens"] > 0
    elif entry["path"] == "/v1/responses":
        assert last.get("response", last)["usage"]["output_tokens"] > 0
    else:
        assert last.get("tokens") or last.get("choices") or last["usage"]["completion_tokens"] > 0


PROGRAMS = optional.CLIENTS / "routers"
MODULES = {"sglang-router": "sglang_router", "smg": "smg", "vllm-router": "vllm_router"}
"""Module of each router that tests/clients/routers.txt names."""

SIZES: dict[str, Any] = {"buckets": (4,), "prefill": (32,), "max_model_len": 512, "max_logprobs": 2}
TEXT = "And God said, Let there be light: and there was light. " * 6
ASKED = {"model": "tiny", "max_tokens": 6, "temperature": 0}
KEY = "key-of-all"
BEARER = {"Authorization": f"Bearer {KEY}"}
CANCELLED = 'npucompile:requests_finished_total{reason="cancelled"}'
until = functools.partial(ranks.eventually, seconds=60)


def metric(server: Server, name: str) -> float:
    lines = httpx.get(f"{server.http}/metrics", headers=BEARER).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    out: Path = tmp_path_factory.mktemp("replicas") / "tiny"
    tiny.built(tiny.planned("qwen3.5-tiny", **SIZES), out)
    return out


def reason(stream: Stream[Completion]) -> str:
    """Why the rest of a stream ends; "" where it breaks off."""
    found = ""
    with contextlib.suppress(OpenAIError, httpx.HTTPError):
        for chunk in stream:
            found = next((choice.finish_reason for choice in chunk.choices if choice.finish_reason), found)
    return found


@contextlib.contextmanager
def replica(artifact: Path, *options: object) -> Iterator[Server]:
    keys = artifact.parent / "keys"
    keys.write_text(KEY)
    server = Server(artifact, "--served-model-name", "tiny", "--api-key", keys, *options)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def replicas(artifact):
    with replica(artifact) as one, replica(artifact) as two:
        yield one, two


def healthy(url: str) -> set[str]:
    """Servers that a router takes for healthy."""
    answer = httpx.get(f"{url}/workers", headers=BEARER)
    workers = answer.json()["workers"] if answer.status_code == 200 else []
    return {worker["url"] for worker in workers if worker["is_healthy"]}


@contextlib.contextmanager
def routed(router: str, folder: Path, policy: str, *servers: Server, **more: object) -> Iterator[OpenAI]:
    """A client of a router that has found these servers; `more` are options of the router."""
    port, metrics, urls = ranks.free_port(), ranks.free_port(), [server.http for server in servers]
    python = PROGRAMS / router / "bin" / "python"
    options = {
        "--host": "127.0.0.1",
        "--api-key": KEY,
        "--port": port,
        "--policy": policy,
        "--prometheus-host": "127.0.0.1",
        "--prometheus-port": metrics,
    }
    options |= {f"--{name.replace('_', '-')}": value for name, value in more.items()}
    arguments = [str(part) for option in options.items() for part in option]
    command = [str(python), "-m", f"{MODULES[router]}.launch_router", *arguments, "--worker-urls", *urls]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log, cwd=folder) as process:
        try:
            url = f"http://127.0.0.1:{port}"

            def found() -> bool:
                assert process.poll() is None, (folder / "log").read_text()
                with contextlib.suppress(httpx.TransportError):
                    return healthy(url) == set(urls)
                return False

            until(found)
            with OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
                yield client
        finally:
            process.kill()


@pytest.fixture(scope="module", params=MODULES)
def router(request):
    if not (PROGRAMS / request.param).exists():
        pytest.skip("`make clients` installs the routers that nobody here wrote; CI does")
    return request.param


@pytest.mark.long
def test_answers_are_those_of_a_server_and_a_client_that_leaves_ends_its_request(router, replicas, tmp_path):
    messages: Any = [{"role": "user", "content": "Who made the light?"}]
    with (
        routed(router, tmp_path, "round_robin", *replicas) as client,
        OpenAI(base_url=f"{replicas[0].http}/v1", api_key=KEY) as direct,
    ):
        expected = direct.chat.completions.create(messages=messages, **ASKED).choices[0].message.content
        continued = direct.completions.create(prompt=TEXT, **ASKED).choices[0].text
        before = [metric(server, "npucompile:prompt_tokens_total") for server in replicas]
        for _ in range(2):
            assert client.chat.completions.create(messages=messages, **ASKED).choices[0].message.content == expected
            assert client.completions.create(prompt=TEXT, **ASKED).choices[0].text == continued
            chunks = list(client.chat.completions.create(messages=messages, stream=True, stream_options={"include_usage": True}, **ASKED))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
            assert len(chunks) > 2
            assert chunks[-1].usage.completion_tokens == ASKED["max_tokens"]
        response = client.responses.create(model="tiny", input="Who made the light?", max_output_tokens=6, temperature=0)
        assert response.output_text == expected
        # Both replicas had some.
        assert all(metric(server, "npucompile:prompt_tokens_total") > count for server, count in zip(replicas, before, strict=True))

        ended = sum(metric(server, CANCELLED) for server in replicas)
        stream = client.completions.create(
            model="tiny", prompt="In the beginning", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in zip(range(2), stream, strict=False):
            pass
        assert sum(metric(server, "npucompile:num_requests_running") for server in replicas) == 1
        stream.close()
        until(lambda: not any(metric(server, "npucompile:num_requests_running") for server in replicas))
        until(lambda: sum(metric(server, CANCELLED) for server in replicas) == ended + 1)


@pytest.mark.long
def test_prompts_that_begin_alike_go_to_the_replica_that_has_their_prefix(router, replicas, tmp_path):
    names = [f"npucompile:prefix_cache_{what}_total" for what in ("queries", "hits")]
    with routed(router, tmp_path, "cache_aware", *replicas) as client:
        before = [[metric(server, name) for name in names] for server in replicas]
        text = f"{router}: {TEXT}"
        for number in range(4):
            client.completions.create(prompt=f"{text}{number}", **ASKED)
        after = [[metric(server, name) for name in names] for server in replicas]
    grown = sorted([now - then for now, then in zip(*pair, strict=True)] for pair in zip(after, before, strict=True))
    assert grown[0] == [0, 0]
    queries, hits = grown[1]
    assert 0 < hits < queries


@pytest.mark.long
def test_a_replica_that_is_killed_costs_its_own_streams_and_no_later_request(router, artifact, replicas, tmp_path):
    with replica(artifact) as victim, routed(router, tmp_path, "round_robin", replicas[0], victim) as client:
        for _ in range(2):
            client.completions.create(prompt="a", **ASKED)
        long: dict[str, Any] = {**ASKED, "max_tokens": 60, "stream": True, "extra_body": {"ignore_eos": True}}
        streams = [client.completions.create(prompt="a", **long) for _ in range(2)]
        assert all(next(stream).choices for stream in streams)
        assert metric(victim, "npucompile:num_requests_running") == 1
        victim.process.kill()
        victim.process.wait()
        assert sorted(map(reason, streams)) == ["", "length"]
        for _ in range(6):
            assert client.completions.create(prompt="a", **ASKED).usage.completion_tokens == ASKED["max_tokens"]


@pytest.mark.long
def test_a_replica_that_is_leaving_gets_nothing_new_and_refuses_nobody(router, artifact, replicas, tmp_path):
    checks = {"health_check_endpoint": "/ready", "health_check_interval_secs": 1, "health_failure_threshold": 1}
    with (
        replica(artifact, "--drain-notice", 60) as leaver,
        routed(router, tmp_path, "round_robin", replicas[0], leaver, **checks) as client,
    ):
        url = str(client.base_url).removesuffix("/v1/")
        leaver.process.terminate()
        until(lambda: client.completions.create(prompt="a", **ASKED) and leaver.http not in healthy(url))
        count = metric(leaver, "npucompile:prompt_tokens_total")
        assert count > 0
        for _ in range(4):
            client.completions.create(prompt="a", **ASKED)
        assert metric(leaver, "npucompile:prompt_tokens_total") == count
