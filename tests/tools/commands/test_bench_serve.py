"""tools/commands/bench_serve.py: the command against our own server and a stub, its reports, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import tiny
from support.sse_server import SseServer

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


@pytest.fixture(scope="module")
def stub() -> Iterator[SseServer]:
    with SseServer().serving() as server:
        yield server


def test_our_own_server_under_load(ours: str, tiny_artifact: Path, tmp_path: Path) -> None:
    report, page = tmp_path / "report.json", tmp_path / "page.html"
    result = tiny.cli(
        tmp_path, "bench", "serve", "--base-url", ours, "--tokenizer", tiny_artifact, *SMALL, "--random-range-ratio", 0.5,
        "--max-concurrency", 3, "--request-rate", 200, "--goodput", "ttft:60000,tpot:60000", "--json", report, "--timeline", page,
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
    assert "Plotly.newPlot" in page.read_text()


@pytest.mark.parametrize("backend", ["openai", "openai-chat", "sglang"])
def test_our_own_server_over_each_http_api(ours: str, tiny_artifact: Path, tmp_path: Path, backend: str) -> None:
    place = ("--base-url", ours, "--tokenizer", tiny_artifact, "--backend", backend)
    result = tiny.cli(tmp_path, "bench", "serve", *place, *SMALL, "--num-prompts", 8, "--max-concurrency", 4, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["completed"], data["failed"], data["total_output_tokens"]) == (8, 0, 40)
    # Greedy and past the end of text: drafts change when tokens arrive, and not how many.
    assert [request["told"]["output_tokens"] for request in data["requests"]] == [5] * 8
    for request in data["requests"]:
        arrived = sum(tokens for _, tokens in request["arrivals"])
        assert arrived == 5 if backend == "sglang" else 1 <= arrived <= 5
        # The text of a chat's prompt may be other tokens than the planned ones.
        assert backend == "openai-chat" or request["told"]["prompt_tokens"] == request["planned_tokens"]
    assert 0 < data["median_ttft_ms"] <= data["median_e2el_ms"]


GROUPS = ("--gsp-num-groups", 2, "--gsp-prompts-per-group", 3)
LENGTHS = ("--gsp-system-prompt-len", 9, "--gsp-question-len", 2, "--gsp-output-len", 3)
DATASETS = [
    ("--dataset", "generated-shared-prefix", *GROUPS, *LENGTHS),
    ("--dataset", "trace", "--dataset-path", "trace"),
    ("--dataset", "prompts", "--dataset-path", "prompts", "--random-output-len", 3),
]


@pytest.mark.parametrize("options", DATASETS, ids=lambda options: options[1])
def test_every_dataset(ours: str, tiny_artifact: Path, tmp_path: Path, monkeypatch: Any, options: tuple[Any, ...]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts").write_text("a\nbc\ndef\n")
    trace = [{"timestamp": 20 * i, "input_length": 4 + i, "output_length": 2 + i, "hash_ids": [0]} for i in range(3)]
    Path("trace").write_text("".join(json.dumps(entry) + "\n" for entry in trace))
    result = tiny.cli(tmp_path, "bench", "serve", "--base-url", ours, "--tokenizer", tiny_artifact, "--ignore-eos", *options, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    sizes = {
        "generated-shared-prefix": [(11, 3)] * 6,
        "trace": [(4, 2), (5, 3), (6, 4)],
        "prompts": [(1, 3), (2, 3), (3, 3)],
    }[data["dataset"]]
    assert [(request["prompt_tokens"], request["output_tokens"]) for request in data["requests"]] == sizes
    if data["dataset"] == "trace":
        assert [request["due_s"] for request in data["requests"]] == [0.0, 0.02, 0.04]


def test_another_server_and_the_key_of_the_environment(stub: SseServer, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    url = f"{stub.url}/v1/"
    result = tiny.cli(
        tmp_path, "bench", "serve", "--backend", "openai", "--base-url", url, "--tokenizer", tiny_checkpoint, *SMALL, "--json"
    )
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["model_id"], data["completed"], data["total_output_tokens"]) == ("stub", 6, 30)
    # The warm-up is one request more.
    assert len(stub.received) == 7
    assert all(headers["authorization"] == "Bearer secret" and body["model"] == "stub" for headers, body in stub.received)


@pytest.mark.parametrize(("backend", "variable"), [("npucompile-ws", "NPUCOMPILE_API_KEY"), ("sglang", "OPENAI_API_KEY")])
def test_our_own_server_behind_a_key(
    service: Service, tiny_artifact: Path, tmp_path: Path, monkeypatch: Any, backend: str, variable: str
) -> None:
    with running(service, settings=Serving(access=Access.of(["secret-key"], [], []))) as server:
        url = server.url.replace("ws:", "http:").removesuffix("/v1/responses")
        arguments = ("bench", "serve", "--backend", backend, "--base-url", url, "--tokenizer", tiny_artifact, *SMALL)
        for name in ("NPUCOMPILE_API_KEY", "OPENAI_API_KEY"):
            monkeypatch.setenv(name, "another-key")
        assert "401" in tiny.refused(tmp_path, *arguments)
        monkeypatch.setenv(variable, "secret-key")
        assert tiny.cli(tmp_path, *arguments).exit_code == 0


def test_a_load_that_does_not_fit_the_context_is_refused(ours: str, tiny_artifact: Path, tmp_path: Path) -> None:
    place = ("--base-url", ours, "--tokenizer", tiny_artifact, "--random-input-len", 60, "--num-prompts", 1, "--ignore-eos")
    message = tiny.refused(tmp_path, "bench", "serve", *place, "--random-output-len", 5)
    assert "60 prompt tokens and 5 to generate; legal is together at most the 64 of the model's context" in message
    assert tiny.cli(tmp_path, "bench", "serve", *place, "--random-output-len", 4).exit_code == 0


def test_failed_requests_are_counted_by_message_and_are_status_1(stub: SseServer, tiny_checkpoint: Path, tmp_path: Path) -> None:
    stub.fault = "event"
    try:
        arguments = ("bench", "serve", "--backend", "openai", "--base-url", stub.url, "--tokenizer", tiny_checkpoint, *SMALL)
        result = tiny.cli(tmp_path, *arguments, "--warmup-requests", 0)
        assert result.exit_code == 1
        assert "Failed requests:                         6\n" in result.stdout
        assert "6 failed: the engine died\n" in result.stdout
        assert "a warm-up request failed: the engine died" in tiny.refused(tmp_path, *arguments)
    finally:
        stub.fault = ""


def test_the_tokenizer_of_the_served_models_name_is_found(ours: str, own_artifact: Path, tmp_path: Path) -> None:
    # NPUCOMPILE_HOME has an artifact of that name.
    assert tiny.cli(tmp_path, "bench", "serve", "--base-url", ours, *SMALL, "--num-prompts", 1).exit_code == 0


REFUSED = [
    (("--model", "nobody"), "the served model is 'nobody', and nothing of that name here has a tokenizer"),
    (("--tokenizer", "absent"), "--tokenizer is 'absent', and nothing of that name"),
    (("--dataset", "trace"), "--dataset trace needs --dataset-path"),
    (("--dataset-path", __file__), "--dataset random takes no --dataset-path"),
    (("--dataset", "trace", "--dataset-path", "trace", "--request-rate", 2), "--request-rate is 2.0 with --dataset trace"),
    (("--request-rate", 0), "a request rate of 0.0"),
    (("--extra-body", "[]"), "--extra-body is '[]'; legal is a JSON object"),
    (("--extra-body", "{"), "--extra-body is not JSON"),
    (("--goodput", "itl:3"), "--goodput has 'itl:3'"),
    (("--base-url", "ws://h"), "--base-url is 'ws://h'; legal is http://"),
    (("--base-url", "http://127.0.0.1:9"), "http://127.0.0.1:9/v1/models lists no model"),
    (("--timeline", "absent/page.html"), "absent is no directory"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[" ".join(map(str, options[:2])) for options, _ in REFUSED])
def test_what_does_not_fit_is_refused_before_the_load(
    stub: SseServer, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: Any, options: tuple[Any, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace").write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}\n')
    stub.received.clear()
    tokenizer = () if "--model" in options else ("--tokenizer", tiny_checkpoint)
    given = ("bench", "serve", "--backend", "openai", "--base-url", stub.url, *tokenizer, *options)
    assert message in tiny.refused(tmp_path, *given)
    assert stub.received == []
