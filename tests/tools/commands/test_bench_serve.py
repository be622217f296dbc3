"""tools/commands/bench_serve.py: the command against our own server, its reports, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import tiny

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.server.engine.service import Service
from npucompile.server.guard.access import Access
from npucompile.server.run import Serving, running, serving
from npucompile.tools.serve.api_settings import ApiSettings
from npucompile.tools.serve.serving import start_service

SMALL = ("--random-input-len", 8, "--random-output-len", 5, "--num-prompts", 6, "--ignore-eos")


@pytest.fixture(scope="module")
def service(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    artifact = Artifact.open(tiny_artifact)
    template = tmp_path_factory.mktemp("chat") / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    started = start_service(artifact, lambda: CpuExecutor(artifact), api=ApiSettings(chat_template=template))
    yield started.service
    started.engine.stop(drain=False)


@pytest.fixture(scope="module")
def ours(service: Service) -> Iterator[str]:
    with serving(service) as url:
        yield url.replace("ws:", "http:").removesuffix("/v1/responses")


def test_our_own_server_under_load(ours: str, tiny_artifact: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = tiny.cli(
        tmp_path, "bench", "serve", "--base-url", ours, "--tokenizer", tiny_artifact, *SMALL, "--random-range-ratio", 0.5,
        "--max-concurrency", 3, "--request-rate", 200, "--goodput", "ttft:60000,tpot:60000", "--json", report,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "Successful requests:                     6\n" in result.stdout
    assert "Maximum request concurrency:             3\n" in result.stdout
    data = json.loads(report.read_text())
    assert (data["completed"], data["failed"], data["model_id"], data["request_rate"]) == (6, 0, "tiny", 200.0)
    # Every request ran to its length, and the server counts what we count.
    assert data["total_input_tokens"] == sum(request["planned_tokens"] for request in data["requests"])
    for request in data["requests"]:
        assert request["told"]["output_tokens"] == sum(tokens for _, tokens in request["arrivals"])
        assert request["told"]["queue_ms"] <= request["told"]["first_token_ms"] <= 1e3 * (request["ended_s"] - request["sent_s"])
    assert 2 <= data["max_concurrent_requests"] <= 3
    assert 1 <= data["accept_length"] <= 4
    assert data["request_goodput"] == data["request_throughput"]


def test_a_file_of_prompts(ours: str, tiny_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("a\nbc\ndef\n")
    place = ("--base-url", ours, "--tokenizer", tiny_artifact, "--dataset", "prompts", "--dataset-path", tmp_path / "prompts")
    result = tiny.cli(tmp_path, "bench", "serve", *place, "--ignore-eos", "--random-output-len", 3, "--json")
    assert result.exit_code == 0, result.output
    requests = json.loads(result.stdout)["requests"]
    assert [(request["prompt_tokens"], request["output_tokens"]) for request in requests] == [(1, 3), (2, 3), (3, 3)]


def test_our_own_server_behind_a_key(service: Service, tiny_artifact: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with running(service, settings=Serving(access=Access.of(["secret-key"], [], []))) as server:
        url = server.url.replace("ws:", "http:").removesuffix("/v1/responses")
        arguments = ("bench", "serve", "--base-url", url, "--tokenizer", tiny_artifact, *SMALL)
        monkeypatch.setenv("NPUCOMPILE_API_KEY", "another-key")
        assert "401" in tiny.refused(tmp_path, *arguments)
        monkeypatch.setenv("NPUCOMPILE_API_KEY", "secret-key")
        assert tiny.cli(tmp_path, *arguments).exit_code == 0


def test_a_load_that_does_not_fit_the_context_is_refused(ours: str, tiny_artifact: Path, tmp_path: Path) -> None:
    place = ("--base-url", ours, "--tokenizer", tiny_artifact, "--random-input-len", 60, "--num-prompts", 1, "--ignore-eos")
    message = tiny.refused(tmp_path, "bench", "serve", *place, "--random-output-len", 5)
    assert "60 prompt tokens and 5 to generate; legal is together at most the 64 of the model's context" in message
    assert tiny.cli(tmp_path, "bench", "serve", *place, "--random-output-len", 4).exit_code == 0


def test_failed_requests_are_counted_by_message_and_are_status_1(ours: str, tiny_artifact: Path, tmp_path: Path) -> None:
    body = ("--extra-body", '{"temperature": -1}')
    arguments = ("bench", "serve", "--base-url", ours, "--tokenizer", tiny_artifact, *SMALL, *body)
    result = tiny.cli(tmp_path, *arguments, "--warmup-requests", 0)
    assert result.exit_code == 1
    assert "Failed requests:                         6\n" in result.stdout
    assert "6 failed: " in result.stdout
    assert "a warm-up request failed: " in tiny.refused(tmp_path, *arguments)


def test_the_tokenizer_of_the_served_models_name_is_found(ours: str, own_artifact: Path, tmp_path: Path) -> None:
    # NPUCOMPILE_HOME has an artifact of that name.
    assert tiny.cli(tmp_path, "bench", "serve", "--base-url", ours, *SMALL, "--num-prompts", 1).exit_code == 0


REFUSED = [
    (("--backend", "openai"), "--backend openai is gone"),
    (("--gsp-num-groups", 8), "legal is: python -m sglang.bench_serving"),
    (("--timeline", "page.html"), "--timeline is gone"),
    (("--model", "nobody"), "the served model is 'nobody', and nothing of that name here has a tokenizer"),
    (("--dataset", "prompts"), "--dataset prompts needs --dataset-path"),
    (("--request-rate", 0), "a request rate of 0.0"),
    (("--extra-body", "[]"), "--extra-body is '[]'; legal is a JSON object"),
    (("--goodput", "itl:3"), "--goodput has 'itl:3'"),
    (("--base-url", "http://127.0.0.1:9"), "http://127.0.0.1:9/v1/models lists no model"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[" ".join(map(str, options[:2])) for options, _ in REFUSED])
def test_what_does_not_fit_is_refused_before_the_load(
    ours: str, tiny_checkpoint: Path, tmp_path: Path, options: tuple[Any, ...], message: str
) -> None:
    tokenizer = () if "--model" in options else ("--tokenizer", tiny_checkpoint)
    assert message in tiny.refused(tmp_path, "bench", "serve", "--base-url", ours, *tokenizer, *options)
