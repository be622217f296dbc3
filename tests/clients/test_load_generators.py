"""Load generators that nobody here wrote, unchanged, against the bundled model: guidellm, and SGLang's benchmark of serving."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from support import bundled
from support.optional import PYTHON, RUNS_CLIENTS

from npucompile.models import registry

REQUESTS, TOKENS = 6, 8

pytestmark = RUNS_CLIENTS


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    out = tmp_path_factory.mktemp("clients") / "tiny"
    with bundled.served(out, buckets=(4,), prefill=(32,), max_model_len=128, max_logprobs=0) as (url, _):
        yield url


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm_counts_every_token(url, tmp_path, path):
    report = tmp_path / "report.json"
    options = {
        "--backend": f"kind=openai_http,target={url},model=qwen3.5-tiny,request_format={path}",
        "--profile": "kind=concurrent,streams=2",
        "--constraint": f"kind=max_requests,count={REQUESTS}",
        "--tokenizer": f"kind=huggingface_auto,model={registry.find('qwen3.5-tiny').checkpoint_dir}",
        "--data": f"kind=synthetic_text,prompt_tokens=16,output_tokens={TOKENS}",
        "--output": f"kind=json,path={report}",
    }
    command = [PYTHON, "-m", "guidellm", "run", *(part for option in options.items() for part in option), "--disable-console"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    assert (metrics["request_totals"]["successful"], metrics["request_totals"]["errored"]) == (REQUESTS, 0), run.stderr
    assert metrics["output_token_count"]["successful"]["total_sum"] == REQUESTS * TOKENS


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai-chat", "vllm"])
def test_sglang_bench_serving_counts_every_token(url, tmp_path, backend):
    report = tmp_path / "report.jsonl"
    options = {
        "--backend": backend, "--base-url": url, "--model": "qwen3.5-tiny", "--tokenizer": registry.find("qwen3.5-tiny").checkpoint_dir,
        "--dataset-name": "random-ids", "--random-input-len": 24, "--random-output-len": TOKENS, "--random-range-ratio": 1,
        "--num-prompts": REQUESTS, "--max-concurrency": 3, "--warmup-requests": 1, "--output-file": report,
    }  # fmt: skip
    command = [PYTHON, "-m", "sglang.bench_serving", *(str(part) for option in options.items() for part in option)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert run.returncode == 0, run.stdout + run.stderr
    (result,) = (json.loads(line) for line in report.read_text().splitlines())
    assert (result["completed"], result["total_output_tokens"]) == (REQUESTS, REQUESTS * TOKENS), run.stdout
    assert 0 < result["mean_ttft_ms"] < result["mean_e2e_latency_ms"]
