"""Stock proxies with the configurations of docs/proxies, in front of two servers whose engines answer with the server's name."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support import optional, ranks
from support.scripted import MODEL, ScriptedEngine
from support.texts import byte_codec
from websockets.sync.client import ClientConnection, connect

from npucompile.server.engine.service import Service
from npucompile.server.guard.access import Access
from npucompile.server.guard.limits import SocketLimits
from npucompile.server.run import RunningServer, Serving, running

RECIPES = Path(__file__).resolve().parents[2] / "docs" / "proxies"
PROXY, CLIENT, OTHER = "127.0.0.1", "127.0.0.2", "127.0.0.3"
SESSIONS = [f"session-{number}" for number in range(8)]
until = functools.partial(ranks.eventually, seconds=60)


@contextlib.contextmanager
def server(name: str) -> Iterator[tuple[RunningServer, ScriptedEngine]]:
    """A server that answers with its name, or begins to and waits; one request may run and none wait."""
    with contextlib.closing(ScriptedEngine(lambda prompt: f"{name}…" if "wait" in prompt else name)) as engine:
        service = Service(engine, byte_codec(), MODEL, limits=SocketLimits(max_queue=0))  # type: ignore[arg-type]
        with running(service, settings=Serving(access=Access.of(proxies=[PROXY]))) as answer:
            yield answer, engine


@pytest.fixture
def servers():
    with server("one") as one, server("two") as two:
        yield {"one": one, "two": two}


def haproxy(text: str, folder: Path) -> list[str]:
    file = folder / "haproxy.cfg"
    file.write_text(text)
    return [optional.haproxy(), "-db", "-f", str(file)]


def impatient_haproxy(text: str, folder: Path) -> list[str]:
    """What pauses for more than a second must be a tunnel to live."""
    assert "timeout server 1h" in text
    return haproxy(text.replace("timeout client 1h", "timeout client 1s").replace("timeout server 1h", "timeout server 1s"), folder)


def nginx(text: str, folder: Path) -> list[str]:
    # Anyone may run it here, and its logs and files are the test's.
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    own = "access_log off; " + " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    file = folder / "nginx.conf"
    file.write_text(text.replace("http {", f"http {{ {own}"))
    return [optional.nginx(), "-c", str(file), "-e", f"{folder}/log", "-g", f"daemon off; pid {folder}/pid;"]


@pytest.fixture(params=[("haproxy.cfg", haproxy), ("nginx.conf", nginx)], ids=lambda param: param[0])
def proxied(request, servers, tmp_path):
    recipe, command = request.param
    text = (RECIPES / recipe).read_text(encoding="utf-8")
    port = ranks.free_port()
    for old, new in {
        "127.0.0.1:8001": f"127.0.0.1:{servers['one'][0].port}",
        "127.0.0.1:8002": f"127.0.0.1:{servers['two'][0].port}",
        "bind :8000": f"bind {PROXY}:{port}",
        "listen 8000": f"listen {PROXY}:{port}",
    }.items():
        text = text.replace(old, new)
    with subprocess.Popen(command(text, tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:

            def answers() -> bool:
                assert process.poll() is None, process.communicate()
                with contextlib.suppress(httpx.TransportError):
                    return httpx.get(f"http://{PROXY}:{port}/ready").status_code == 200
                return False

            until(answers)
            yield port
        finally:
            process.terminate()


@contextlib.contextmanager
def opened(port: int, session: str, address: str = CLIENT, **headers: str) -> Iterator[ClientConnection]:
    """A websocket of a client at some address."""
    given = {"X-Session-ID": session, **headers}
    with (
        socket.create_connection((PROXY, port), source_address=(address, 0), timeout=60) as stream,
        connect(f"ws://{PROXY}:{port}/v1/responses", sock=stream, proxy=None, additional_headers=given) as websocket,
    ):
        yield websocket


def said(websocket: ClientConnection) -> str:
    """What the server behind a websocket answers."""
    websocket.send(json.dumps({"type": "response.create", "input": "who", "store": False}))
    while True:
        event = json.loads(websocket.recv(timeout=60))
        assert event["type"] not in ("error", "response.failed"), event
        if event["type"] == "response.completed":
            return str(event["response"]["output"][0]["content"][0]["text"])


def asked(port: int, session: str, prompt: str = "who") -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 9}
    return httpx.post(f"http://{PROXY}:{port}/v1/completions", json=body, headers={"X-Session-ID": session}, timeout=60)


def test_a_session_keeps_to_its_server_over_both_protocols(proxied):
    owners = {}
    for session in SESSIONS:
        with opened(proxied, session) as one, opened(proxied, session, OTHER) as two:
            found = {said(one), said(two), asked(proxied, session).json()["choices"][0]["text"]}
        (owners[session],) = found
    assert set(owners.values()) == {"one", "two"}


@pytest.mark.parametrize("proxied", [("haproxy.cfg", impatient_haproxy)], ids=["haproxy.cfg"], indirect=True)
def test_a_socket_may_be_idle(proxied):
    with opened(proxied, "a") as websocket:
        owner = said(websocket)
        time.sleep(2.5)
        assert said(websocket) == owner


def test_a_server_that_is_full_has_its_requests_served_by_the_other(proxied, servers):
    owner = asked(proxied, "a").json()["choices"][0]["text"]
    _, engine = servers[owner]
    thread = threading.Thread(target=asked, args=(proxied, "a", "wait"))
    thread.start()
    until(lambda: engine.stats()["num_requests_running"])
    answer = asked(proxied, "a")
    engine.cancel(*(request.id for request in engine.requests))
    thread.join(60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == ("two" if owner == "one" else "one")


def test_clients_are_told_apart_by_the_proxy_and_by_nobody_else(proxied, servers):
    tenants = {}
    with opened(proxied, "a", CLIENT) as websocket:
        _, engine = servers[said(websocket)]
    tenants["client"] = engine.requests[-1].tenant
    with opened(proxied, "a", OTHER) as websocket:
        said(websocket)
    tenants["other"] = engine.requests[-1].tenant
    with opened(proxied, "a", CLIENT, **{"X-Forwarded-For": OTHER}) as websocket:
        said(websocket)
    tenants["claims"] = engine.requests[-1].tenant
    (answer,) = (entry for entry, of in servers.values() if of is engine)
    # Past the proxy, at an address that is not trusted.
    with opened(answer.port, "a", CLIENT, **{"X-Forwarded-For": OTHER}) as websocket:
        said(websocket)
    tenants["past"] = engine.requests[-1].tenant
    assert tenants["client"] == tenants["claims"] == tenants["past"] != tenants["other"]


@pytest.mark.parametrize("proxied", [("haproxy.cfg", haproxy)], ids=["haproxy.cfg"], indirect=True)
def test_a_server_that_is_leaving_keeps_its_sockets_and_gets_no_new_ones(proxied, servers):
    with opened(proxied, "a") as kept:
        owner = said(kept)
        servers[owner][0].lifecycle.leaving = True

        def goes_elsewhere() -> bool:
            with opened(proxied, "a") as websocket:
                return said(websocket) != owner

        until(goes_elsewhere)
        assert said(kept) == owner
