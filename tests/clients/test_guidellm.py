"""guidellm, unchanged, against the bundled model: every request succeeds, and every token is counted."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support import bundled

from npucompile.models import registry

PYTHON = Path(__file__).resolve().parents[2] / ".venv-clients" / "bin" / "python"
REQUESTS, TOKENS = 6, 8

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON.exists(), reason="`make clients` installs the clients that nobody here wrote; CI does"),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    out = tmp_path_factory.mktemp("clients") / "tiny"
    with bundled.served(out, buckets=(4,), prefill=(32,), max_model_len=128, max_logprobs=0) as (url, _):
        yield url


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_request_succeeds_and_every_token_is_counted(url, tmp_path, path):
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
