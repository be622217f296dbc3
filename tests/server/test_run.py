"""server/run.py: starting, stopping and failing to start."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest
from support.scripted import MODEL, ManualEngine, ScriptedEngine
from support.texts import byte_codec
from tokenizers import Tokenizer, models
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus
from websockets.sync.client import connect

from npucompile.graphs.errors import SpecError
from npucompile.server import run
from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate
from npucompile.server.engine.service import ServedModel, Service
from npucompile.server.run import Serving, Stop, running, serve, serving, websocket_url
from npucompile.server.text.tokenizer import TextTokenizer


@pytest.fixture
def service():
    return Service(ManualEngine(), TextTokenizer(Tokenizer(models.BPE())), ServedModel("tiny", 16, 16))


def threads():
    return {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("number", run.SIGNALS)
def test_a_signal_ends_serve_and_handlers_come_back(service, number):
    before = [signal.getsignal(each) for each in run.SIGNALS]
    ready = []

    def on_ready(host, port):
        ready.append((host, port))
        signal.raise_signal(number)

    serve(service, on_ready=on_ready)
    ((host, port),) = ready
    assert host == "127.0.0.1"
    assert port > 0
    assert [signal.getsignal(each) for each in run.SIGNALS] == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))


def test_a_second_interrupt_does_not_wait_for_anyone(service):
    def on_ready(host, port):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    serve(service, port=0, on_ready=on_ready)


def test_small_writes_do_not_wait_for_acknowledgements():
    """asyncio sets TCP_NODELAY only on sockets that name their protocol: a response took 46 ms instead of 0.5 ms."""
    with run.listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_server_may_have_as_many_connections_open_as_its_user_may():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = run.MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, run.MAX_OPEN_FILES)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        run.allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (max(1024, most), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_taken_port_is_named(service):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SpecError, match=rf"127\.0\.0\.1 port {port}: .*in use.*a free port"):
            serve(service, port=port)


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("127.0.0.1", 70_000), ("not a host", 0)])
def test_an_address_that_is_not_ours_is_named(service, host, port):
    with pytest.raises(SpecError, match=f"cannot listen on {host} port {port}"), serving(service, host, port):
        pass


def test_serving_leaves_no_thread_behind(service):
    with serving(service) as url:
        assert "npucompile-server" in threads()
    assert "npucompile-server" not in threads()
    place = urlsplit(url)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((place.hostname, place.port))


def test_urls():
    assert websocket_url("127.0.0.1", 8000) == "ws://127.0.0.1:8000/v1/responses"
    assert websocket_url("h", 1, tls=True) == "wss://h:1/v1/responses"
    assert websocket_url("::1", 1) == "ws://[::1]:1/v1/responses"


@pytest.mark.skipif(sys.platform != "linux", reason="the option is Linux's")
def test_the_kernel_drops_clients_that_never_read():
    with run.listen("127.0.0.1", 0) as listener:
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == run.UNREAD_MS


def ready(server):
    """Status of /ready."""
    place = urlsplit(server.url)
    with contextlib.closing(http.client.HTTPConnection(place.hostname, place.port, timeout=60)) as connection:
        connection.request("GET", "/ready")
        return connection.getresponse().status


@contextlib.contextmanager
def streaming(server):
    """A socket with a response that has begun."""
    with connect(server.url, proxy=None, compression=None) as socket:
        socket.send('{"type":"response.create","input":"x"}')
        while '"response.in_progress"' not in socket.recv(timeout=60):
            pass
        yield socket


def refused(url, error):
    with pytest.raises(error) as caught, connect(url, proxy=None):
        pass
    return caught.value


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stream_ends_before_the_server_does_and_nothing_new_begins():
    engine = ManualEngine()
    service = Service(engine, byte_codec(), ServedModel("tiny", 16, 256))
    with Stop() as stop, running(service) as server, streaming(server) as websocket:
        waiting = threading.Thread(target=server.wait, args=(stop,))
        waiting.start()
        assert ready(server) == 200
        signal.raise_signal(signal.SIGTERM)
        until(lambda: ready(server) == 503)
        answer = refused(server.url, InvalidStatus).response
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert waiting.is_alive()
        (name,) = engine.requests
        engine.emit(name, "last words")
        engine.finish(name)
        waiting.join(60)
        frames = [websocket.recv(timeout=60)]
        while '"type":"response.completed"' not in frames[-1]:
            frames.append(websocket.recv(timeout=60))
    assert "last words" in frames[-1]
    assert engine.cancelled == []


def test_a_server_says_that_it_is_leaving_before_it_refuses_anybody():
    engine = ManualEngine()
    service = Service(engine, byte_codec(), ServedModel("tiny", 16, 256))
    settings = Serving(drain_notice_s=3600.0, drain_timeout_s=0.0)
    with Stop() as stop, running(service, settings=settings) as server:
        waiting = threading.Thread(target=server.wait, args=(stop,))
        waiting.start()
        place = urlsplit(server.url)
        kept = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
        kept.request("GET", "/health")
        assert kept.getresponse().read()
        signal.raise_signal(signal.SIGTERM)
        until(lambda: ready(server) == 503)
        with streaming(server):
            assert len(engine.requests) == 1
        kept.request("GET", "/v1/models")
        answer = kept.getresponse()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        answer.read()
        assert waiting.is_alive()
        # A second signal takes back the notice, too.
        signal.raise_signal(signal.SIGTERM)
        waiting.join(60)
        assert not waiting.is_alive()
        assert refused(server.url, InvalidStatus).response.status_code == 503


@pytest.mark.parametrize("how", ["timeout", "second signal", "failure"])
def test_a_stream_that_does_not_end_is_not_waited_for_for_ever(how):
    engine = ManualEngine()
    service = Service(engine, byte_codec(), ServedModel("tiny", 16, 256))
    settings = Serving(drain_timeout_s=0.2 if how == "timeout" else 3600.0)
    with Stop() as stop, running(service, settings=settings) as server, streaming(server) as websocket:
        signals = 0 if how == "failure" else 1 if how == "timeout" else 2
        for _ in range(signals):
            signal.raise_signal(signal.SIGTERM)
        server.wait(stop, lambda: how == "failure")
        server.close()
        with pytest.raises(ConnectionClosed) as closed:
            websocket.recv(timeout=60)
        assert closed.value.rcvd.code == 1012
    assert len(engine.cancelled) == 1


def test_a_terminal_that_is_closed_ends_nothing_that_was_told_to_go_on():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.wanted
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


PATHS = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}, "/generate": {"text": "x"}}


def test_an_answer_that_the_end_of_the_server_cuts_looks_like_no_whole_one():
    """Over HTTP, streamed and whole, and over the websocket."""
    with contextlib.closing(ScriptedEngine(lambda _: "ab…")) as engine:
        service = Service(engine, byte_codec(), MODEL, chat=ChatFormat(ChatTemplate("{{ messages[0].content }}")))
        answers = {}
        with Stop() as stop, running(service, settings=Serving(drain_timeout_s=0.2)) as server, streaming(server) as websocket:

            def ask(path, stream):
                url = f"http://127.0.0.1:{server.port}{path}"
                answers[path, stream] = httpx.post(url, json={**PATHS[path], "stream": stream}, timeout=60)

            asking = [threading.Thread(target=ask, args=(path, stream)) for path in PATHS for stream in (False, True)]
            for thread in asking:
                thread.start()
            assert engine.wait_submitted(1 + len(asking))
            signal.raise_signal(signal.SIGTERM)
            server.wait(stop)
            # As the engine does when it is stopped.
            engine.cancel(*(request.id for request in engine.requests))
            for thread in asking:
                thread.join(60)
            frame = websocket.recv(timeout=60)
            while "response.failed" not in frame:
                frame = websocket.recv(timeout=60)
    assert json.loads(frame)["response"]["error"]["code"] == "draining"
    for (path, stream), answer in answers.items():
        assert (answer.status_code, "draining" in answer.text) == (200 if stream else 503, True), path
        assert stream or answer.headers["retry-after"] == "2"
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        assert not stream or "draining" in json.dumps(events[-1])
        assert '"abort"' not in answer.text


def test_a_signal_while_starting_ends_what_runs():
    with pytest.raises(KeyboardInterrupt), Stop(raises=True):
        signal.raise_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", folder / "key", "-out", folder / "cert"],
        check=True,
        capture_output=True,
    )
    return folder


def test_tls(service, certificate):
    settings = Serving(tls_cert=certificate / "cert", tls_key=certificate / "key")
    trusting = ssl.create_default_context(cafile=certificate / "cert")
    with running(service, settings=settings) as server:
        assert server.url.startswith("wss://")
        with connect(server.url, proxy=None, ssl=trusting) as websocket:
            websocket.send("{")
            assert "invalid_json" in websocket.recv(timeout=60)
        refused(server.url.replace("wss:", "ws:"), InvalidMessage)


def test_a_certificate_that_cannot_be_used_is_named(service, certificate, tmp_path):
    (tmp_path / "cert").write_text("no certificate")
    for cert in (tmp_path / "cert", tmp_path / "none"):
        with pytest.raises(SpecError, match=f"TLS certificate {cert}"), running(service, settings=Serving(tls_cert=cert)):
            pass
