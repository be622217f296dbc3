"""tools/commands/chat.py: text streams to standard output from a real server, and errors reach the user."""

from __future__ import annotations

import socket

import pytest
from support import tiny

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.request import Sampling
from npucompile.server.run import serving, websocket_url
from npucompile.server.text.tokenizer import TextTokenizer
from npucompile.tools.ranks.offline import complete
from npucompile.tools.serve.serving import start_service


@pytest.fixture(scope="module")
def server(tiny_artifact):
    artifact = Artifact.open(tiny_artifact)
    running = start_service(artifact, lambda: CpuExecutor(artifact))
    with serving(running.service) as url:
        yield running, url
    running.engine.stop(drain=False)


def test_an_answer_is_what_the_model_says_offline(tmp_path, tiny_artifact, server):
    running, url = server
    artifact = Artifact.open(tiny_artifact)
    codec = TextTokenizer.load(tiny_artifact / artifact.manifest.tokenizer)
    sampling = Sampling(0.9, 50, 0.95, 0.001, seed=11)
    (completion,) = complete(CpuExecutor(artifact), [codec.encode("in the")], sampling, 20, frozenset(artifact.manifest.model["eos_ids"]))
    options = ("--max-tokens", 20, "--temperature", 0.9, "--top-k", 50, "--top-p", 0.95, "--min-p", 0.001, "--seed", 11)
    result = tiny.cli(tmp_path, "chat", "in the", "--url", url, *options)
    assert result.exit_code == 0, result.output
    assert result.stdout == codec.decode(completion.token_ids) + "\n"
    before = running.engine.stats()
    assert before["compiles_after_ready_total"] == 0
    assert before["spec_decode_num_draft_tokens_total"] > 0
    off = tiny.cli(tmp_path, "chat", "in the", "--url", url, *options, "--speculative-tokens", 0)
    assert off.stdout == result.stdout
    assert running.engine.stats()["spec_decode_num_draft_tokens_total"] == before["spec_decode_num_draft_tokens_total"]


def test_what_the_server_refuses_is_said(tmp_path, server):
    _, url = server
    assert "the context of 'tiny' is 64 tokens" in tiny.refused(tmp_path, "chat", "x" * 64, "--url", url)
    assert "temperature" in tiny.refused(tmp_path, "chat", "x", "--temperature", "-2", "--url", url)
    assert "speculative_tokens is 4; legal is" in tiny.refused(
        tmp_path, "chat", "x", "--max-tokens", 4, "--speculative-tokens", 4, "--url", url
    )


def test_where_nobody_listens_a_server_is_suggested(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = websocket_url("127.0.0.1", listener.getsockname()[1])
    message = tiny.refused(tmp_path, "chat", "x", "--url", url)
    assert f"cannot connect to {url}" in message
    assert "`npucompile serve` starts a server" in message


def test_an_address_that_is_none_is_said(tmp_path):
    for url in ("localhost:8000", "127.0.0.1:8000", "ftp://localhost", "ws://", "http://[::1", ""):
        message = tiny.refused(tmp_path, "chat", "x", "--url", url)
        assert f"--url is {url!r}; legal is ws://HOST:PORT/v1/responses, or http://HOST:PORT" in message


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/v1/responses"])
def test_the_url_of_the_http_api_is_one_of_the_websocket(tmp_path, server, path):
    http = server[1].replace("ws:", "http:").replace("/v1/responses", path)
    assert tiny.cli(tmp_path, "chat", "in", "--max-tokens", 2, "--url", http).exit_code == 0
