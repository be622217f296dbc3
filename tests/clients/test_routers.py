"""Routers that nobody here wrote, unchanged, in front of the bundled model.

routed.json has the bodies that they made of plain ones of clients (recorded from the programs, with a server that writes down what it is
sent): each is answered. The programs themselves run where `make clients` installed them.
"""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from support import bundled

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
