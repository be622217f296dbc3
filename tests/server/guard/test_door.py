"""server/guard/door.py: over a real port, nothing passes the door that `access` refuses, by HTTP or by websocket."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from contextlib import closing
from urllib.parse import urlsplit

import pytest
from support.scripted import ManualEngine
from support.texts import byte_codec
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from npucompile.graphs.errors import ProtocolError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.engine import Engine
from npucompile.runtime.scheduler.kv_cache_manager import PrefixCacheSettings
from npucompile.server.client import Client
from npucompile.server.engine.service import ServedModel, Service
from npucompile.server.guard.access import Access
from npucompile.server.guard.door import Door
from npucompile.server.run import Serving, running


class NoEngine:
    def stats(self):
        return {}


@pytest.fixture(scope="module")
def url():
    access = Access.of(["the-key"], ["https://chat.example.org"], ["llm.example.org"])
    with running(Service(NoEngine(), byte_codec(), ServedModel("tiny", 16, 256)), settings=Serving(access=access)) as server:
        yield server.url


KEY = {"Authorization": "Bearer the-key"}


def ask(url, path, method="GET", **headers):
    place = urlsplit(url)
    with closing(http.client.HTTPConnection(place.hostname, place.port, timeout=60)) as connection:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        body = response.read()
        return response.status, response.headers, body


def handshake(url, subprotocols=(), **headers):
    """Status and body of a refused handshake, or 101."""
    place = urlsplit(url)
    # The library sends the host of the URL.
    url = url.replace(place.netloc, headers.pop("Host", place.netloc))
    with socket.create_connection((place.hostname, place.port), timeout=60) as stream:
        try:
            with connect(url, proxy=None, sock=stream, additional_headers=headers, subprotocols=list(subprotocols) or None):
                return 101, b""
        except InvalidStatus as refused:
            return refused.response.status_code, refused.response.body


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 401, "invalid_api_key"),
        ({"Authorization": "Bearer other"}, 401, "invalid_api_key"),
        (KEY | {"Origin": "https://evil.example"}, 403, "origin_not_allowed"),
        (KEY | {"Host": "rebound.example"}, 421, "host_not_allowed"),
    ],
)
def test_what_is_refused_is_refused_for_both(url, headers, status, code, caplog):
    actual, answer, body = ask(url, "/v1/models", **headers)
    assert (actual, json.loads(body)["error"]["code"]) == (status, code)
    assert set(json.loads(body)["error"]) == {"type", "code", "message", "param"}
    assert (answer["www-authenticate"] == "Bearer") == (status == 401)
    actual, body = handshake(url, **headers)
    assert (actual, json.loads(body)["error"]["code"]) == (status, code)
    # What strangers send does not fill the log.
    assert caplog.text == ""


def test_what_is_let_in(url):
    for headers in (KEY, KEY | {"Origin": "https://chat.example.org"}, KEY | {"Host": "llm.example.org"}):
        assert ask(url, "/v1/models", **headers)[0] == 200
        assert handshake(url, **headers)[0] == 101
    assert handshake(url, ["npucompile.json", "openai-insecure-api-key.the-key"])[0] == 101
    assert handshake(url, ["npucompile.json", "openai-insecure-api-key.other"])[0] == 401


def test_probes_need_no_key_but_their_own_host(url):
    for path in ("/health", "/ready"):
        assert ask(url, path)[0] == 200
        assert ask(url, path, Host="rebound.example")[0] == 421
        assert ask(url, path, Origin="https://evil.example")[0] == 403


def test_a_page_that_is_allowed_may_read_the_answer_and_another_may_not(url):
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    status, headers, _ = ask(url, "/v1/models", "OPTIONS", Origin="https://chat.example.org", **asked)
    assert (status, headers["access-control-allow-origin"]) == (200, "https://chat.example.org")
    assert "authorization" in headers["access-control-allow-headers"].lower()
    assert ask(url, "/v1/models", Origin="https://chat.example.org", **KEY)[1]["access-control-allow-origin"] == "https://chat.example.org"
    for origin in ("https://evil.example", "null"):
        status, headers, _ = ask(url, "/v1/models", "OPTIONS", Origin=origin, **asked)
        assert (status, headers["access-control-allow-origin"]) == (400, None)


def test_a_page_that_is_allowed_may_reach_into_a_private_network_and_another_may_not(url):
    """What Chromium asks before a page of the internet reaches a server on this machine."""
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Private-Network": "true"}
    status, headers, _ = ask(url, "/v1/responses", "OPTIONS", Origin="https://chat.example.org", **asked)
    assert (status, headers["access-control-allow-private-network"]) == (200, "true")
    assert ask(url, "/v1/responses", "OPTIONS", Origin="https://evil.example", **asked)[0] == 400


def test_our_client_has_a_key(url):
    async def run():
        async with await Client.connect(url, api_key="the-key"):
            pass
        with pytest.raises(ProtocolError, match=r"refuses the connection with status 401: .*the API key is missing") as refused:
            await Client.connect(url)
        assert refused.value.code == "connection_refused"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("scheme", "headers", "status", "counted"),
    [
        ("http", KEY, 200, []),
        ("http", KEY, 404, ["key "]),
        ("http", {}, 401, ["10.0.0.9"]),
        ("websocket", {}, 401, ["10.0.0.9"]),
    ],
)
def test_what_is_refused_is_counted_for_its_client_before_it_is_answered(scheme, headers, status, counted):
    order = []

    class Counted:
        def wait_s(self, client, work_s):
            assert work_s == 0
            order.append(client)
            return 0.0

        def charge(self, client, work_s):
            assert work_s == 0

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message):
        order.append(message)

    scope = {
        "type": scheme,
        "path": "/v1/models",
        "client": ("10.0.0.9", 1),
        "headers": [(b"host", b"localhost"), *((name.lower().encode(), value.encode()) for name, value in headers.items())],
        "extensions": {"websocket.http.response": {}},
    }
    asyncio.run(Door(app, Access.of(["the-key"], [], []), Counted(), lambda: False)(scope, None, send))
    # A client with a key is that key, whose digest follows.
    assert [entry[: len(begin)] for entry, begin in zip(order, counted, strict=False)] == counted
    assert order[len(counted)]["status"] == status
    assert sum(isinstance(entry, str) for entry in order) == len(counted)


@pytest.mark.parametrize("trusted", [True, False])
def test_a_trusted_proxy_says_whose_request_it_is_and_nobody_else_does(trusted):
    service = Service(ManualEngine(), byte_codec(), ServedModel("tiny", 16, 256))
    access = Access.of(proxies=["127.0.0.0/8"] if trusted else [])
    clients = {"one": "10.1.1.1", "one again": "9.9.9.9, 10.1.1.1", "two": "10.2.2.2", "none": None}
    tenants = {}
    with running(service, settings=Serving(access=access)) as server:
        for name, address in clients.items():
            headers = {} if address is None else {"X-Forwarded-For": address}
            with connect(server.url, proxy=None, additional_headers=headers) as websocket:
                websocket.send('{"type":"response.create","input":"x"}')
                while '"response.in_progress"' not in websocket.recv(timeout=60):
                    pass
                tenants[name] = list(service._engine.requests.values())[-1].tenant
    # What stands before the last address is what the client says.
    assert tenants["one"] == tenants["one again"]
    assert len(set(tenants.values())) == (3 if trusted else 1)


def test_keys_do_not_share_what_is_cached_of_prompts(tiny_artifact):
    """Over both protocols: the same prompt is found again under the same key alone."""
    engine = Engine.from_loader(lambda: CpuExecutor(Artifact.open(tiny_artifact)), prefix_cache=PrefixCacheSettings(), refresh_every_s=None)
    limits = engine.executor.limits
    prompt = list(range(1, 3 * limits.page_size))
    model = ServedModel("tiny", limits.max_model_len, engine.executor.vocab_size)
    access = Access.of(["first-key", "second-key"])

    def over_http(url, key):
        place, body = urlsplit(url), json.dumps({"prompt": prompt, "max_tokens": 2, "temperature": 0})
        with closing(http.client.HTTPConnection(place.hostname, place.port, timeout=60)) as connection:
            connection.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {key}"})
            answer = json.loads(connection.getresponse().read())
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["text"]

    async def over_websocket(url, key):
        async with await Client.connect(url, api_key=key) as client:
            output = await client.create(prompt, max_output_tokens=2, temperature=0).completion()
        return output.usage["input_tokens_details"], output.text

    try:
        with running(Service(engine, byte_codec(), model), settings=Serving(access=access)) as server:
            cold, text = asyncio.run(over_websocket(server.url, "first-key"))
            # What the first has computed, the second computes again and keeps for itself.
            assert over_http(server.url, "second-key") == (0, text)
            found, again = over_http(server.url, "first-key")
            warm, _ = asyncio.run(over_websocket(server.url, "second-key"))
    finally:
        engine.stop(drain=False)
    whole = (len(prompt) - 1) // limits.page_size * limits.page_size
    assert cold == {"cached_tokens": 0, "cache_write_tokens": len(prompt)}  # an output token fills the last page
    assert warm == {"cached_tokens": found, "cache_write_tokens": 0}
    assert 0 < found <= whole
    assert again == text
