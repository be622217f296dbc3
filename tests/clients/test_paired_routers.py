"""Routers that nobody here wrote, unchanged, in front of two prefill servers and a decode server of the bundled model."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from clients.test_routers import ASKED, BEARER, CANCELLED, KEY, MODULES, PROGRAMS, TEXT, metric, replica, until
from openai import APIStatusError, OpenAI
from support import optional, ranks, tiny
from support.servers import Server

from npucompile.tools.advisor.launch_lines.imported import import_text

PAIRED = {"sglang-router": "--pd-disaggregation", "vllm-router": "--vllm-pd-disaggregation"}
"""What each router calls it. smg takes this server for vLLM, and learns its connector from annotations of Kubernetes alone."""

RUNNING, HANDED = "npucompile:num_requests_running", "npucompile:kv_transfer_requests_total"


class Pair:
    """Two prefill servers and their decode server; and one server of both roles, for what is expected."""

    def __init__(self, artifact: Path, stack: contextlib.ExitStack) -> None:
        self.prefills = [stack.enter_context(replica(artifact, "--role", "prefill")) for _ in range(2)]
        urls = ",".join(server.http for server in self.prefills)
        self.decode = stack.enter_context(replica(artifact, "--role", "decode", "--prefill", urls))
        self.both = stack.enter_context(replica(artifact))
        until(lambda: metric(self.decode, "npucompile:kv_transfer_connections") == 2)

    def idle(self) -> bool:
        """Nothing runs, and nothing is held."""
        servers = (*self.prefills, self.decode)
        return not any(metric(server, name) for server in servers for name in (RUNNING, "npucompile:kv_transfer_rooms"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    optional.transfer_engine()
    out: Path = tmp_path_factory.mktemp("pairs") / "tiny"
    tiny.built(tiny.planned("qwen3.5-tiny", buckets=(4,), prefill=(32,), max_model_len=512, max_logprobs=2), out)
    with contextlib.ExitStack() as stack:
        yield Pair(out, stack)


@pytest.fixture(scope="module", params=PAIRED)
def client(request, pair, tmp_path_factory) -> Iterator[OpenAI]:
    """Of a router."""
    router = request.param
    if not (PROGRAMS / router).exists():
        pytest.skip("`make clients` installs the routers that nobody here wrote; CI does")
    folder, port, metrics = tmp_path_factory.mktemp(router), ranks.free_port(), ranks.free_port()
    python = PROGRAMS / router / "bin" / "python"
    command = [python, "-m", f"{MODULES[router]}.launch_router", PAIRED[router], "--policy", "round_robin", "--api-key", KEY]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--prometheus-host",
        "127.0.0.1",
        "--prometheus-port",
        metrics,
        "--decode",
        pair.decode.http,
    ]
    for number, server in enumerate(pair.prefills):
        command += ["--prefill", server.http, *([8998 + number] if router == "sglang-router" else [])]
    if router == "sglang-router":
        # A line as guides have it, with bootstrap ports, as `npucompile import` prints it.
        (role,) = import_text(shlex.join(["python", *map(str, command[1:])])).roles
        command = [python, *shlex.split(role.routes[0])[1:]]
    # vllm-router asks pairs with the key that its environment has.
    named = {**os.environ, "OPENAI_API_KEY": KEY}
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen([*map(str, command)], stdout=log, stderr=log, cwd=folder, env=named) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"

            def works() -> bool:
                assert process.poll() is None, (folder / "log").read_text()
                with contextlib.suppress(httpx.TransportError):
                    body = {"model": "tiny", "prompt": "a b", "max_tokens": 1}
                    return httpx.post(f"{url}/v1/completions", json=body, headers=BEARER, timeout=60).status_code == 200
                return False

            until(works)
            with OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
                yield client
        finally:
            process.kill()


def direct(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.http}/v1", api_key=KEY, max_retries=0)


@pytest.mark.long
def test_answers_are_those_of_one_server(client, pair):
    messages: Any = [{"role": "user", "content": "Who made the light?"}]
    with direct(pair.both) as both:
        expected = both.chat.completions.create(messages=messages, **ASKED).choices[0].message.content
        several = [choice.text for choice in both.completions.create(prompt=[TEXT, "And God said"], **ASKED).choices]
    handed, computed = metric(pair.decode, HANDED), [metric(server, "npucompile:prompt_tokens_total") for server in pair.prefills]
    for _ in range(2):
        assert client.chat.completions.create(messages=messages, **ASKED).choices[0].message.content == expected
        chunks = list(client.chat.completions.create(messages=messages, stream=True, stream_options={"include_usage": True}, **ASKED))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
        assert chunks[-1].usage.completion_tokens == ASKED["max_tokens"]
    answer = client.completions.create(prompt=[TEXT, "And God said"], **ASKED)
    assert [choice.text for choice in answer.choices] == several
    assert len(client.chat.completions.create(messages=messages, n=2, **ASKED).choices) == 2
    assert metric(pair.decode, HANDED) == handed + 8
    assert metric(pair.decode, "npucompile:kv_transfer_local_total") == 0
    assert all(metric(server, "npucompile:prompt_tokens_total") >= count for server, count in zip(pair.prefills, computed, strict=True))
    until(pair.idle)


@pytest.mark.long
def test_what_one_side_refuses_both_refuse_at_once(client, pair):
    with pytest.raises(APIStatusError) as refused:
        client.completions.create(model="tiny", prompt="And God said", max_tokens=100_000)
    assert refused.value.status_code == 400
    until(pair.idle)


@pytest.mark.long
def test_a_client_that_leaves_ends_its_request(client, pair):
    ended = metric(pair.decode, CANCELLED)
    stream = client.completions.create(
        model="tiny", prompt="In the beginning", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in zip(range(2), stream, strict=False):
        pass
    stream.close()
    until(lambda: metric(pair.decode, CANCELLED) == ended + 1)
    until(pair.idle)


@pytest.mark.long
def test_a_prefill_server_that_is_not_the_decode_servers_own_is_refused(pair):
    body = {"prompt": "And God said", "bootstrap_host": "10.9.9.9", "bootstrap_port": 8998, "bootstrap_room": 5}
    answer = httpx.post(f"{pair.decode.http}/v1/completions", json=body, headers=BEARER)
    assert answer.status_code == 400
    assert "10.9.9.9:8998; legal are those of `npucompile serve --prefill`: http://" in answer.json()["error"]["message"]
