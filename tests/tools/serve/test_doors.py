"""tools/serve/doors.py: several processes speak with clients at one address, and are one server to them."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from support import ranks, tiny
from support.once import made_once
from support.optional import needs_module
from support.servers import Server

from npucompile.graphs.errors import NpucompileError, ProtocolError, RequestError, SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.server.client import Client
from npucompile.server.guard.limits import SocketLimits
from npucompile.server.pictures.limits import DecoderLimits, MediaLimits
from npucompile.server.run import Serving, serving
from npucompile.server.siblings.ids import door_of
from npucompile.tools.serve.api_settings import ApiSettings
from npucompile.tools.serve.door import DoorSettings
from npucompile.tools.serve.doors import Doors, shared
from npucompile.tools.serve.serving import start_service

COUNT = 3
PROMPT = "In the beginning"
SETTINGS = DoorSettings("127.0.0.1", Serving(), ApiSettings(), MediaLimits())


def built(out: Path) -> None:
    tiny.built(tiny.planned("qwen3.5-tiny", buckets=(4,), prefill=(32,), max_model_len=256), out)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "door", built)


@pytest.fixture(scope="module")
def server(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("doors") / "access.jsonl"
    running = Server(artifact, "--api-servers", COUNT, "--no-build", "--max-client-requests", 4, "--access-log", log)
    running.log = log  # type: ignore[attr-defined]
    yield running
    running.close()


class Caller:
    """A connection to one of the doors."""

    def __init__(self, server: Server) -> None:
        self.connection = http.client.HTTPConnection(server.http.removeprefix("http://"), timeout=60)
        _, body = self.ask("POST", "/v1/responses", input=PROMPT, max_output_tokens=1)
        self.door = door_of(body["id"])

    def ask(self, method: str, path: str, **body: Any) -> tuple[int, Any]:
        self.connection.request(method, path, json.dumps(body) if body else None, {"content-type": "application/json"})
        answer = self.connection.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if text[:1] in "[{" else text

    def respond(self, text: str = PROMPT, **fields: Any) -> Any:
        status, body = self.ask("POST", "/v1/responses", input=text, temperature=0, **fields)
        assert status == 200, body
        return body


@pytest.fixture(scope="module")
def callers(server: Server) -> Iterator[list[Caller]]:
    """A connection to each door: the kernel spreads them."""
    yield (found := callers_of(server))
    for caller in found:
        caller.connection.close()


def callers_of(server: Server, count: int = COUNT) -> list[Caller]:
    found: dict[int | None, Caller] = {}
    for _ in range(200):
        caller = Caller(server)
        if caller.door in found:
            caller.connection.close()
        found.setdefault(caller.door, caller)
        if len(found) == count:
            return [found[door] for door in sorted(map(int, found))]  # type: ignore[arg-type]
    raise AssertionError(f"200 connections came to doors {list(found)}")


async def clients_of(server: Server) -> dict[int, Client]:
    """A websocket to each door."""
    clients: dict[int, Client] = {}
    for _ in range(200):
        client = await Client.connect(server.url)
        door = door_of((await client.create(PROMPT, max_output_tokens=1).completion()).response_id)
        assert door is not None
        if door in clients:
            await client.close()
        clients.setdefault(door, client)
        if len(clients) == COUNT:
            return clients
    raise AssertionError(f"200 sockets came to doors {list(clients)}")


def doors_of(server: Server) -> list[int]:
    return [pid for pid in ranks.children_of(server.process.pid) if b"serve.door" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def number(text: str, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if re.match(rf"{re.escape(name)}[ {{]", line))


def test_tokens_are_those_of_one_process_through_every_door(artifact: Path, callers: list[Caller]) -> None:
    alone = start_service(Artifact.open(artifact), lambda: CpuExecutor(Artifact.open(artifact)))
    try:
        with serving(alone.service) as url:
            connection = http.client.HTTPConnection(url.removeprefix("ws://").partition("/")[0], timeout=60)
            body = json.dumps({"input": PROMPT, "temperature": 0, "max_output_tokens": 12})
            connection.request("POST", "/v1/responses", body)
            expected = json.loads(connection.getresponse().read())["output"]
            connection.close()
    finally:
        alone.engine.stop(drain=False)
    for caller in callers:
        output = caller.respond(max_output_tokens=12)["output"]
        assert [item["content"] for item in output] == [item["content"] for item in expected]


def test_a_response_is_found_continued_and_deleted_through_any_door(callers: list[Caller]) -> None:
    first, second, third = callers
    kept = first.respond(max_output_tokens=6)
    path = f"/v1/responses/{kept['id']}"
    assert [caller.ask("GET", path) for caller in callers] == [(200, kept)] * COUNT
    here, there = (caller.respond(" and", max_output_tokens=6, previous_response_id=kept["id"]) for caller in (first, second))
    assert here["output"][0]["content"] == there["output"][0]["content"]
    assert here["usage"]["input_tokens"] == there["usage"]["input_tokens"]
    # Each is kept where it was made, whose conversation the other door was told.
    assert [door_of(body["id"]) for body in (kept, here, there)] == [first.door, first.door, second.door]
    assert third.ask("DELETE", path)[1]["deleted"] is True
    assert {caller.ask("GET", path)[0] for caller in callers} == {404}
    status, refused = third.ask("POST", "/v1/responses", input="a", previous_response_id=kept["id"])
    assert (status, refused["error"]["code"], refused["error"]["param"]) == (400, "previous_response_not_found", "previous_response_id")


def test_what_runs_is_read_cancelled_and_followed_through_another_door(callers: list[Caller]) -> None:
    first, second, _ = callers
    running = first.respond(max_output_tokens=200, background=True, ignore_eos=True)
    path = f"/v1/responses/{running['id']}"
    assert second.ask("GET", path)[1]["status"] in ("in_progress", "queued")
    status, ended = second.ask("POST", f"{path}/cancel")
    assert (status, ended["status"]) == (200, "cancelled")
    status, events = second.ask("GET", f"{path}?stream=true")
    assert status == 200
    names = re.findall(r"^event: (.*)$", events, re.MULTILINE)
    assert (names[0], names[-1]) == ("response.created", "response.cancelled")
    status, tail = second.ask("GET", f"{path}?stream=true&starting_after={len(names) - 2}")
    assert (status, re.findall(r"^event: (.*)$", tail, re.MULTILINE)) == (200, ["response.cancelled"])
    status, refused = second.ask("GET", f"{path}?stream=true&starting_after=100000")
    assert (status, refused["error"]["code"]) == (400, "invalid_field")


def test_a_stream_is_resumed_on_a_socket_of_another_door(server: Server) -> None:
    async def resumed() -> None:
        clients = await clients_of(server)
        try:
            expected = (await clients[1].create(PROMPT, max_output_tokens=60, ignore_eos=True).completion()).token_ids
            stream = clients[0].create(PROMPT, max_output_tokens=60, ignore_eos=True, resumable=True)
            first = await anext(aiter(stream))
            response_id = first["response"]["id"]
            assert (await clients[1].resume(response_id).completion()).token_ids == expected
            lost = clients[0].create(PROMPT, max_output_tokens=150, ignore_eos=True, resumable=True)
            first = await anext(aiter(lost))
            await clients.pop(0).close()
            follower = clients[2].resume(first["response"]["id"])
            await anext(aiter(follower))
            # Cancelled where it is followed, it ends where it runs.
            await follower.cancel()
            assert (await follower.completion()).status == "cancelled"
        finally:
            for client in clients.values():
                await client.close()

    asyncio.run(resumed())


def test_limits_of_a_client_are_of_all_doors_together(callers: list[Caller]) -> None:
    first, second, _ = callers
    running = [first.respond(max_output_tokens=200, background=True, ignore_eos=True)["id"] for _ in range(4)]
    time.sleep(0.1)
    status, refused = second.ask("POST", "/v1/responses", input=PROMPT, max_output_tokens=2)
    assert (status, refused["error"]["code"]) == (429, "too_many_requests")
    for response_id in running:
        second.ask("POST", f"/v1/responses/{response_id}/cancel")
    ranks.eventually(lambda: second.ask("POST", "/v1/responses", input=PROMPT, max_output_tokens=2)[0] == 200, 5)


def test_a_request_is_aborted_by_its_id_through_another_door(callers: list[Caller]) -> None:
    first, second, _ = callers
    answers = list[Any]()
    params = {"max_new_tokens": 200, "ignore_eos": True}
    asking = threading.Thread(
        target=lambda: answers.append(first.ask("POST", "/generate", text=PROMPT, rid="mine", sampling_params=params))
    )
    asking.start()
    ranks.eventually(lambda: second.ask("POST", "/abort_request", rid="mine")[1]["aborted"] == 1)
    asking.join()
    assert answers[0][1]["meta_info"]["finish_reason"]["type"] == "abort"


def test_metrics_probes_and_the_access_log_are_of_all_doors(server: Server, callers: list[Caller]) -> None:
    async def counted() -> list[Any]:
        clients = await clients_of(server)
        texts = [caller.ask("GET", "/metrics")[1] for caller in callers]
        for client in clients.values():
            await client.close()
        return texts

    # Each is the engine's, once, and the sum of what the doors count.
    for text in asyncio.run(counted()):
        assert number(text, "npucompile:websocket_connections") == COUNT
    before = number(callers[0].ask("GET", "/metrics")[1], "npucompile:requests_total")
    for caller in callers:
        caller.respond(max_output_tokens=1, tools=[{"type": "web_search"}])
    for caller in callers:
        text = caller.ask("GET", "/metrics")[1]
        assert number(text, "npucompile:requests_total") == before + COUNT
        assert number(text, "npucompile:request_parts_left_out_total") == COUNT
        assert caller.ask("GET", "/ready")[0] == 200
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]  # type: ignore[attr-defined]
    assert {door_of(line["id"]) for line in lines if line["event"] == "request" and line["id"].startswith("resp_")} == set(range(COUNT))


def test_one_door_that_dies_costs_its_own_streams_and_comes_back(server: Server) -> None:
    async def survives() -> None:
        clients = await clients_of(server)
        expected = (await clients[1].create(PROMPT, max_output_tokens=150, ignore_eos=True).completion()).token_ids
        streams = {door: client.create(PROMPT, max_output_tokens=150, ignore_eos=True) for door, client in clients.items()}
        followed = clients[0].create(PROMPT, max_output_tokens=200, ignore_eos=True, resumable=True)
        for stream in streams.values():
            await anext(aiter(stream))
        opened = await anext(aiter(followed))
        follower = clients[1].resume(opened["response"]["id"])
        await anext(aiter(follower))
        os.kill(pid_of(server, clients[0]), signal.SIGKILL)
        with pytest.raises((NpucompileError, OSError)):
            await streams[0].completion()
        with pytest.raises((RequestError, ProtocolError), match="has ended or is starting"):
            await follower.completion()
        for door in (1, 2):
            assert (await streams[door].completion()).token_ids == expected
        for client in clients.values():
            await client.close()

    dead = doors_of(server)
    asyncio.run(survives())
    ranks.eventually(lambda: len(doors_of(server)) == COUNT and doors_of(server) != dead, 60)
    assert len(set(doors_of(server)) & set(dead)) == COUNT - 1
    # No request was left to run for nobody, and the port answered all along: who came to that door waited.
    ranks.eventually(lambda: ready(server), 60)
    callers = callers_of(server)
    # A door is ready when it sees all others, and each sees them at its own time.
    ranks.eventually(lambda: {caller.ask("GET", "/ready")[0] for caller in callers} == {200}, 60)
    assert number(callers[0].ask("GET", "/metrics")[1], "npucompile:num_requests_running") == 0
    for caller in callers:
        caller.connection.close()


def ready(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"{server.http}/ready", timeout=60) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as starting:
        starting.close()
        return False


def pid_of(server: Server, client: Client) -> int:
    """The process that has the other end of a socket."""
    host, port = client._websocket.local_address[:2]
    inodes = [line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[2].endswith(f":{port:04X}")]
    assert host == "127.0.0.1"
    for pid in doors_of(server):
        links = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
        if any(f"socket:[{inode}]" in links for inode in inodes):
            return pid
    raise AssertionError(f"no door has the socket of port {port}")


def test_all_drain_by_one_signal_and_what_is_followed_through_another_door_ends_too(server: Server) -> None:
    async def drained() -> None:
        clients = await clients_of(server)
        stream = clients[0].create(PROMPT, max_output_tokens=200, ignore_eos=True, resumable=True)
        opened = await anext(aiter(stream))
        follower = clients[1].resume(opened["response"]["id"])
        await anext(aiter(follower))
        server.process.send_signal(signal.SIGTERM)
        own, other = await asyncio.gather(stream.completion(), follower.completion())
        assert own.token_ids == other.token_ids
        assert len(own.token_ids) == 200
        for client in clients.values():
            await client.close()

    pids = doors_of(server)
    asyncio.run(drained())
    assert server.ended(20)[0] == 0
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


class Collector(BaseHTTPRequestHandler):
    """Takes what an exporter of spans sends."""

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_what_comes_through_several_doors_is_recorded_traced_and_held_to_its_form(artifact: Path, tmp_path: Path) -> None:
    needs_module("opentelemetry.exporter.otlp.proto.http", "pip install 'npucompile[otel]'")
    journal, form = tmp_path / "journal", {"type": "json_schema", "name": "f", "schema": {"enum": ["in", "the", "beginning"]}}
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        collector.bodies = []  # type: ignore[attr-defined]
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        traces = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        server = Server(artifact, "--api-servers", 2, "--no-build", "--record", journal, "--otlp-traces-endpoint", traces)
        try:
            callers = callers_of(server, 2)
            with ThreadPoolExecutor(len(callers)) as threads:
                body = {"input": PROMPT, "text": {"format": form}, "max_output_tokens": 40, "n": 2}
                asked = [threads.submit(caller.ask, "POST", "/v1/responses", **body) for caller in callers]
                answers = [each.result()[1] for each in asked]
            for answer in answers:
                texts = [json.loads(item["content"][0]["text"]) for item in answer["output"]]
                assert len(texts) == 2
                assert set(texts) <= set(form["schema"]["enum"])
            for caller in callers:
                caller.connection.close()
            server.process.send_signal(signal.SIGTERM)
            assert server.ended(20)[0] == 0
        finally:
            server.close()
            collector.shutdown()
    assert {door_of(answer["id"]) for answer in answers} == {0, 1}
    for answer in answers:
        assert answer["id"].encode() in b"".join(collector.bodies)  # type: ignore[attr-defined]
    result = tiny.cli(tmp_path, "replay", journal)
    assert result.exit_code == 0, result.output
    # Those by which connections to both doors were found, and these two.
    repeated = re.search(r"of (\d+) requests repeated", result.stdout)
    assert repeated is not None
    assert int(repeated[1]) >= 4
    assert result.stdout.endswith("nothing differs\n")


def test_what_a_door_holds_for_itself_is_divided() -> None:
    limits, decoders = SocketLimits(max_stored_bytes=1000), DecoderLimits(processes=3)
    settings = SETTINGS._replace(serving=Serving(limits), media=replace(SETTINGS.media, decoders=decoders))
    divided = shared(settings, 3)
    assert (divided.serving.limits.max_stored_bytes, divided.media.decoders.processes) == (334, 1)
    assert divided.serving.limits.max_queue == limits.max_queue
    assert shared(settings, 1) == settings
    kept_nothing = shared(settings._replace(serving=Serving(replace(limits, max_stored_bytes=0))), 3)
    assert kept_nothing.serving.limits.max_stored_bytes == 0


def test_an_address_that_is_taken_is_found_before_a_process_starts(tmp_path: Path) -> None:
    with Doors(SETTINGS, 0, 1, dict(os.environ)) as doors:
        port = int(doors.url.rpartition(":")[2].partition("/")[0])
        for count in (1, 2):
            with pytest.raises(SpecError, match=f"cannot listen on 127.0.0.1 port {port}"):
                Doors(SETTINGS, port, count, {})
