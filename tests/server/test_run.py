"""server/run.py: starting, stopping and failing to start."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from urllib.parse import urlsplit

import pytest
from tokenizers import Tokenizer, models
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from npucompile.graphs.errors import SpecError
from npucompile.server import run
from npucompile.server.run import serve, serving, websocket_url
from npucompile.server.service import ServedModel, Service
from npucompile.server.tokenizer import TextTokenizer
from npucompile.server.websocket import SocketLimits


class Engine:
    def stats(self):
        return {}


@pytest.fixture
def service():
    return Service(Engine(), TextTokenizer(Tokenizer(models.BPE())), ServedModel("tiny", 16, 16))


def threads():
    return {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_serve_and_handlers_come_back(service, number):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    ready = []

    def on_ready(host, port):
        ready.append((host, port))
        signal.raise_signal(number)

    serve(service, port=0, on_ready=on_ready)
    ((host, port),) = ready
    assert host == "127.0.0.1"
    assert port > 0
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))


def test_a_second_interrupt_does_not_wait_for_anyone(service):
    def on_ready(host, port):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    serve(service, port=0, on_ready=on_ready)


def test_connections_are_served_when_it_is_ready(service):
    answers = []

    def on_ready(host, port):
        def client():
            with connect(websocket_url(host, port), proxy=None, compression=None) as websocket:
                websocket.send("x" * 101)
                answers.append(websocket.recv(timeout=60))
                websocket.send("x" * 201)
                try:
                    websocket.recv(timeout=60)
                except ConnectionClosed as closed:
                    answers.append(closed.rcvd.code)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

        thread = threading.Thread(target=client)
        thread.start()
        clients.append(thread)

    clients = []
    serve(service, port=0, max_frame_bytes=100, on_ready=on_ready)
    clients[0].join()
    assert '"frame_too_large"' in answers[0]
    assert answers[1] == 1009


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
    with serving(service, limits=SocketLimits(max_connections=0)) as url:
        assert "npucompile-server" in threads()
        with connect(url, proxy=None, compression=None) as websocket, pytest.raises(ConnectionClosed) as closed:
            websocket.recv(timeout=60)
        assert closed.value.rcvd.code == 1013
    assert "npucompile-server" not in threads()
    place = urlsplit(url)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((place.hostname, place.port))


def test_urls():
    assert websocket_url("127.0.0.1", 8000) == "ws://127.0.0.1:8000/v1/responses"
    assert websocket_url("::1", 1) == "ws://[::1]:1/v1/responses"


@pytest.mark.skipif(sys.platform != "linux", reason="the option is Linux's")
def test_the_kernel_drops_clients_that_never_read():
    with run._listen("127.0.0.1", 0) as listener:
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == run.UNREAD_MS
