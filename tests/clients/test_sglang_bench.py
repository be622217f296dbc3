"""SGLang's own benchmark, unchanged, against the bundled model, in each of the ways that it speaks to a server."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support import bundled

from npucompile.models import registry

PYTHON = Path(__file__).resolve().parents[2] / ".venv-clients" / "bin" / "python"
REQUESTS, TOKENS = 6, 12

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="`make clients` installs the clients that nobody here wrote; CI does"),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    out = tmp_path_factory.mktemp("clients") / "tiny"
    with bundled.served(out, buckets=(4,), prefill=(32,), max_model_len=128, max_logprobs=0) as (url, _):
        yield url


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai-chat", "vllm"])
def test_every_request_succeeds_and_every_token_is_counted(url, tmp_path, backend):
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
