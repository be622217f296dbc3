"""server/openai/control.py: probes, information, and the end of requests."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace

import httpx
import numpy as np
import pytest
from support.scripted import MODEL, ScriptedEngine, scripted
from support.texts import byte_codec

from npucompile import __version__
from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate
from npucompile.server.engine.service import Service
from npucompile.server.guard.access import Access
from npucompile.server.openai import control
from npucompile.server.run import Serving, running


@pytest.fixture
def served():
    with scripted() as (url, engine), httpx.Client(base_url=url.removesuffix("/v1"), timeout=30) as client:
        yield client, engine


def test_experts_are_counted_where_a_build_counts_them(served):
    """In a table of all experts, whichever were chosen; of the engine's numbers that others read they are none."""
    client, _ = served
    answer = client.get("/expert_counts")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_expert_counts")
    with contextlib.closing(ScriptedEngine(lambda prompt: "a")) as engine:
        stats, tables = engine.stats, [{}, {"experts": np.array([[3, 0, 1], [0, 2, 2]])}]
        engine.stats = lambda: {**stats(), **tables[0]}
        counting = Service(engine, byte_codec(), replace(MODEL, num_experts=5))
        with running(counting) as server, httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as client:
            assert client.get("/expert_counts").json() == {"logical_count": []}
            tables.pop(0)
            assert client.get("/expert_counts").json() == {"logical_count": [[3, 0, 1, 0, 0], [0, 2, 2, 0, 0]]}
            assert "experts" not in client.get("/server_info").json()["stats"]
            assert "experts" not in client.get("/metrics").text


@pytest.mark.parametrize(("body", "reason"), [({"rid": "mine"}, "abort"), ({"abort_all": True}, "abort")])
def test_a_request_is_aborted(served, body, reason):
    client, engine = served
    answers = []
    thread = threading.Thread(target=lambda: answers.append(client.post("/generate", json={"text": "ab…", "rid": "mine"})))
    thread.start()
    assert engine.wait_submitted()
    other = client.post("/generate", json={"text": "a", "rid": "mine"})
    assert (other.status_code, other.json()["error"]["param"]) == (400, "rid")
    assert client.post("/abort_request", json={"rid": "another"}).json() == {"aborted": 0}
    assert client.post("/abort_request", json=body).json() == {"aborted": 1}
    thread.join(30)
    assert answers[0].json()["meta_info"]["finish_reason"]["type"] == reason
    assert client.post("/abort_request", json=body).json() == {"aborted": 0}


def test_with_keys_a_client_names_its_own_requests_alone():
    """Two keys may use the same rid, and neither ends what is the other's, by name or by asking for all."""
    with contextlib.closing(ScriptedEngine(lambda prompt: "…")) as engine:
        service = Service(engine, byte_codec(), MODEL, chat=ChatFormat(ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")))
        with running(service, settings=Serving(access=Access.of(["one", "two"]))) as server, contextlib.ExitStack() as stack:
            one, two = (
                stack.enter_context(
                    httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=30, headers={"Authorization": f"Bearer {key}"})
                )
                for key in ("one", "two")
            )
            bodies = (("/generate", {"text": "a", "rid": "mine"}), ("/v1/responses", {"input": "b"}))
            threads = [threading.Thread(target=one.post, args=(path,), kwargs={"json": body}) for path, body in bodies]
            threads.append(threading.Thread(target=two.post, args=("/generate",), kwargs={"json": {"text": "c", "rid": "mine"}}))
            for thread in threads:
                thread.start()
            assert engine.wait_submitted(3)
            assert two.post("/abort_request", json={"rid": "mine"}).json() == {"aborted": 1}
            assert engine.wait_cancelled()
            # It is the key's own until it is answered.
            threads[2].join(30)
            assert two.post("/abort_request", json={"abort_all": True}).json() == {"aborted": 0}
            assert len(engine.cancelled) == 1
            assert one.post("/abort_request", json={"abort_all": True}).json() == {"aborted": 2}
            for thread in threads:
                thread.join(30)


def test_an_abort_names_what_to_abort(served):
    assert served[0].post("/abort_request", json={}).json()["error"]["param"] == "rid"


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_bench_tools_find_what_they_ask_for(served, method):
    client, engine = served

    def ask(path):
        answer = client.request(method, path)
        assert answer.status_code == 200
        return answer

    assert ask("/ping").text == ""
    assert ask("/version").json() == {"version": __version__}
    flushes = engine.flushes
    assert ask("/flush_cache").text == "the prefix cache is flushed\n"
    assert engine.flushes == flushes + 1
    for path in ("/server_info", "/get_server_info"):
        info = ask(path).json()
        assert (info["served_model_names"], info["artifact"], info["internal_states"]) == (["tiny", "small"], MODEL.artifact, [{}])
        # Histograms end at infinity, which JSON does not have.
        groups = {key: {"0": 0} for key in ("dp_requests_running", "dp_requests_waiting", "dp_prompt_tokens")}
        assert info["stats"] == {"num_requests_running": 0, "num_requests_waiting": 0, "request_parts_left_out_total": 0, **groups}
        assert (info["tp_size"], info["dp_size"], info["pp_size"], info["disaggregation_mode"]) == (MODEL.tp, MODEL.dp, 1, "null")
        assert (info["served_model_name"], info["context_length"]) == ("tiny", MODEL.max_model_len)
    for path in ("/model_info", "/get_model_info"):
        assert ask(path).json()["model_path"] == "tiny"


def test_the_load_is_what_waits_and_runs():
    with scripted(lambda prompt: "…") as (url, engine), httpx.Client(base_url=url.removesuffix("/v1"), timeout=30) as client:
        none = {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
        assert client.get("/get_load").json() == [none]
        thread = threading.Thread(target=lambda: client.post("/generate", json={"text": "abc", "rid": "mine"}))
        thread.start()
        assert engine.wait_submitted()
        assert client.get("/get_load").json() == [none | {"num_reqs": 1, "num_tokens": 3}]
        client.post("/abort_request", json={"rid": "mine"})
        thread.join(30)
        assert client.get("/get_load").json() == [none]


def test_the_load_of_each_dp_group_is_told(monkeypatch):
    with scripted() as (url, engine), httpx.Client(base_url=url.removesuffix("/v1"), timeout=30) as client:
        numbers = {"dp_requests_running": {0: 2, 1: 1}, "dp_requests_waiting": {0: 1, 1: 3}, "dp_prompt_tokens": {0: 70, 1: 8}}
        monkeypatch.setattr(engine, "stats", lambda: {"num_requests_running": 3, "num_requests_waiting": 6, **numbers})
        assert client.get("/get_load").json() == [
            # Two are in no group yet.
            {"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 3, "num_tokens": 70},
            {"dp_rank": 1, "num_reqs": 4, "num_waiting_reqs": 3, "num_tokens": 8},
        ]


def test_a_token_is_generated_to_see_whether_one_can_be(served):
    client, engine = served
    answer = client.get("/health_generate")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert engine.requests[-1].max_tokens == 1


def test_an_engine_that_hangs_is_not_healthy(monkeypatch):
    monkeypatch.setattr(control, "PROBE_TIMEOUT_S", 0.05)
    with scripted(lambda prompt: "…") as (url, engine):
        answer = httpx.get(f"{url.removesuffix('/v1')}/health_generate")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        assert engine.wait_cancelled()


def test_each_name_is_a_model(served):
    client, _ = served
    listed = client.get("/v1/models").json()["data"]
    assert [entry["id"] for entry in listed] == ["tiny", "small"]
    assert client.get("/v1/models/small").json() == listed[1]
    refused = client.get("/v1/models/gpt")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
