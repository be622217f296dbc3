"""Requests of published pages (curls.json: the lines, and where they stand), run by bash and curl against the bundled model.

What is changed: the address, the model's name, and how many tokens are asked for, so that it takes seconds. `LONG=1` leaves these.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from support import bundled, optional

LINES = json.loads(Path(__file__).with_name("curls.json").read_text(encoding="utf-8"))
LENGTH = re.compile(r'"(max_tokens|max_completion_tokens|max_new_tokens)": *\d+')


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    optional.curl()
    out = tmp_path_factory.mktemp("curl") / "tiny"
    sizes = {"buckets": (1,), "prefill": (128,), "max_model_len": 2048, "max_logprobs": 0}
    with bundled.served(out, tool_call_parser="hermes", **sizes) as (url, _):
        yield url.removeprefix("http://")


def ours(command: str, address: str) -> str:
    """A line as it is sent here."""
    line = re.sub(r"http://[^/\s]+", f"http://{address}", command)
    line = re.sub(r'"model": *"[^"]*"', '"model": "tiny"', line)
    if "LONG" in os.environ:
        return line
    line = LENGTH.sub(r'"\1": 8', line)
    return line if LENGTH.search(line) or "/models" in line else line.replace('"model": "tiny"', '"model": "tiny", "max_tokens": 8')


@pytest.mark.parametrize("line", LINES, ids=lambda line: line["source"].rpartition("/")[2])
def test_published_lines_are_answered(address, line):
    run = subprocess.run(["bash", "-c", ours(line["command"], address)], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    chunks = [json.loads(part) for part in re.findall(r"^data: (\{.*)$", run.stdout, re.MULTILINE)] or [json.loads(run.stdout)]
    assert not any("error" in chunk for chunk in chunks), run.stdout
    for chunk in chunks:
        if "choices" in chunk:
            assert chunk["model"] == "tiny"
    final = chunks[-1]
    said = final.get("text") or final.get("data") or any(chunk.get("choices") for chunk in chunks)
    assert said, run.stdout
