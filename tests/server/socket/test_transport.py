"""server/socket/transport.py: peers that hold connections open, flood, or do not read, over a real port."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time

import pytest
from support.scripted import ManualEngine
from support.texts import byte_codec
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.sync.client import connect

from npucompile.server.engine.service import ServedModel, Service
from npucompile.server.guard import limits as limits_module
from npucompile.server.guard.limits import SocketLimits
from npucompile.server.run import Serving, running
from npucompile.server.socket.transport import SLICE_BYTES, SMALL_FRAMES_PER_S, LimitedHttp, frame_header

LIMITS = SocketLimits(max_connections=6, max_connections_per_client=4, handshake_s=0.5)


@contextlib.contextmanager
def serving(limits=LIMITS):
    with running(Service(ManualEngine(), byte_codec(), ServedModel("tiny", 4096, 256)), settings=Serving(limits)) as server:
        yield server


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


def peer(server, source="127.0.0.1"):
    return socket.create_connection(("127.0.0.1", server.port), timeout=60, source_address=(source, 0))


def answer(stream):
    """Status and headers of an HTTP response, and the body, up to the end of the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := stream.recv(65536):
            data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    return head.decode(), body


def get(server, source="127.0.0.1"):
    with peer(server, source) as stream:
        stream.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return answer(stream)


def upgraded(server, source="127.0.0.1"):
    stream = peer(server, source)
    key = b"dGhlIHNhbXBsZSBub25jZQ=="
    stream.sendall(
        b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + key + b"\r\n\r\n"
    )
    assert stream.recv(4096).startswith(b"HTTP/1.1 101")
    return stream


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_idle_connections_of_one_address_shut_nobody_else_out(server):
    with contextlib.ExitStack() as stack:
        for _ in range(LIMITS.max_connections_per_client):
            stack.enter_context(upgraded(server))
        head, body = get(server)
        assert head.startswith("HTTP/1.1 429")
        assert "Retry-After: 1" in head
        assert json.loads(body)["error"]["code"] == "too_many_requests"
        assert get(server, "127.0.0.2")[0].startswith("HTTP/1.1 200")
        for _ in range(2):
            stack.enter_context(upgraded(server, "127.0.0.2"))
        head, body = get(server, "127.0.0.3")
        assert head.startswith("HTTP/1.1 503")
        assert json.loads(body)["error"]["code"] == "queue_full"
    until(lambda: get(server)[0].startswith("HTTP/1.1 200"))


def test_a_server_that_runs_more_requests_takes_more_connections(monkeypatch):
    monkeypatch.setattr(limits_module, "LEAST_CONNECTIONS", 2)
    served = Service(ManualEngine(), byte_codec(), ServedModel("tiny", 4096, 256, max_running=3))
    with running(served, settings=Serving(SocketLimits())) as server, contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(upgraded(server))
        head, body = get(server)
        assert head.startswith("HTTP/1.1 429")
        assert "`npucompile serve --max-client-connections`" in json.loads(body)["error"]["message"]


HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
UNFINISHED = {
    "nothing": b"",
    "half a line": b"GET /v1/resp",
    "half a head": HEAD + b"X: ",
    "half a body": HEAD.replace(b"GET", b"POST") + b"Content-Length: 9\r\n\r\nab",
    "half of a second request": HEAD + b"\r\nGET /heal",
}


@pytest.mark.parametrize("sent", UNFINISHED.values(), ids=UNFINISHED)
def test_a_connection_that_brings_no_whole_request_is_closed(server, sent, monkeypatch):
    expired, expire = [], LimitedHttp._expire
    monkeypatch.setattr(LimitedHttp, "_expire", lambda self: (expired.append(self.timeout_s), expire(self)))
    with peer(server) as stream:
        stream.sendall(sent)
        answer(stream)
    # By its own limit, and not by uvicorn's keep-alive.
    assert expired == [LIMITS.handshake_s]


def test_a_socket_that_waits_is_not_closed(server):
    with connect(server.url, proxy=None) as websocket:
        time.sleep(2 * LIMITS.handshake_s)
        websocket.send("{")
        assert "invalid_json" in websocket.recv(timeout=60)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("opcode", [Opcode.PING, Opcode.PONG, Opcode.CONT], ids=lambda opcode: opcode.name)
def test_a_flood_of_small_frames_ends_the_connection_and_takes_no_memory(server, opcode):
    first = Frame(Opcode.TEXT, b"", fin=False).serialize(mask=True) if opcode == Opcode.CONT else b""
    flood = Frame(opcode, b"x" * 100, fin=opcode != Opcode.CONT).serialize(mask=True) * 20_000
    before = resident_bytes()
    with upgraded(server) as stream:
        with contextlib.suppress(ConnectionError):
            stream.sendall(first)
            # More than the kernel's buffers, and nothing is read meanwhile.
            for _ in range(10):
                stream.sendall(flood)
        assert resident_bytes() - before < 20 * 2**20
        data = b""
        with contextlib.suppress(ConnectionError):
            while chunk := stream.recv(65536):
                data += chunk
    # At most the answers of one second, and of the slice in which it was over; then the connection's end.
    assert data.count(b"x" * 100) <= SMALL_FRAMES_PER_S + SLICE_BYTES // 100
    assert get(server)[0].startswith("HTTP/1.1 200")


def test_pings_are_answered(server):
    with connect(server.url, proxy=None) as websocket:
        for _ in range(50):
            assert websocket.ping().wait(60)


def test_large_frames_of_one_peer_do_not_stop_another():
    """What blocked the loop for seconds: messages of 4 MB in the shapes that take longest to parse, and in the smallest fragments."""
    size = 4 * 2**20
    many = ",".join('{"role":"user","content":""}' for _ in range(size // 30))
    frames = [
        '{"type":"response.create","input":[' + many + "]}",
        '{"type":"response.create","input":{' + ",".join(f'"{i}":1' for i in range(size // 12)) + "}}",
        "{" + ",".join(f'"{i}":1' for i in range(size // 12)) + "}",
        '{"type":"response.create","input_token_ids":[' + "1," * (size // 2 - 50) + "1]}",
        '{"type":"response.create","input":"' + "\\u00e9" * (size // 6 - 20) + '"}',
        '{"type":"response.create","input":"' + "ab " * (size // 3 - 20) + '"}',
    ]
    with serving(SocketLimits(max_frame_bytes=size)) as server, connect(server.url, proxy=None, compression=None) as other:
        lags, stop = [], threading.Event()

        def beside():
            while not stop.is_set():
                began = time.monotonic()
                other.send("{")
                other.recv(timeout=60)
                lags.append(time.monotonic() - began)

        thread = threading.Thread(target=beside)
        thread.start()
        try:
            with connect(server.url, proxy=None, compression=None, max_size=None) as websocket:
                for frame in frames:
                    websocket.send(frame)
                    assert '"type":"error"' in websocket.recv(timeout=60)
        finally:
            stop.set()
            thread.join()
    # What stops everybody is one call of C that parses a frame; json's takes as long. It was 40 times that.
    began = time.monotonic()
    json.loads(frames[3])
    assert max(lags) < 10 * (time.monotonic() - began)


@pytest.mark.parametrize("frames", [[b"\x81\x82\0\0\0\0\xff\xff"], [b"\x01\x81\0\0\0\0\xe2", b"\x80\x81\0\0\0\0\x82"]])
def test_text_that_is_not_utf_8_closes_its_socket_and_is_no_fault(server, caplog, frames):
    errors = logging.getLogger("uvicorn.error")
    errors.addHandler(caplog.handler)
    try:
        with upgraded(server) as stream:
            for frame in frames:
                stream.sendall(frame)
            assert stream.recv(4096) == b"\x88\x02\x03\xef"
            assert stream.recv(4096) == b""
    finally:
        errors.removeHandler(caplog.handler)
    assert caplog.records == []


def test_a_fragmented_message_is_read(server):
    with connect(server.url, proxy=None) as websocket:
        websocket.send(["{", '"type":', '"x"', "}"])
        assert "unknown_type" in websocket.recv(timeout=60)


@pytest.mark.parametrize("length", [0, 1, 125, 126, 65535, 65536, 2**20])
def test_headers_are_those_of_the_websocket_library(length):
    data = bytes(length)
    for opcode in (Opcode.TEXT, Opcode.BINARY):
        assert frame_header(opcode, length) + data == Frame(opcode, data).serialize(mask=False)


def test_a_peer_that_is_cut_off_leaves_no_count(server):
    for _ in range(3 * LIMITS.max_connections):
        with contextlib.suppress(ConnectionClosed), connect(server.url, proxy=None) as websocket:
            websocket.socket.shutdown(socket.SHUT_RDWR)
    until(lambda: get(server)[0].startswith("HTTP/1.1 200"))
