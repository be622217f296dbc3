"""Two prefill and two decode servers on machines of their own, of which one is killed, stopped or cut off while requests run: every request
ends with its tokens or a named error, nothing is held afterwards, and service goes on. And a writer that stands still, however long."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from support import optional, ranks, servers, tiny
from support.fleet import ADDRESS, Answer, OneKind, started, until
from support.machines import Machine, machines

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.kv_transfer.layout import instance_of, located
from npucompile.runtime.kv_transfer.opening import open_pools
from npucompile.runtime.request import Request
from npucompile.server.fleet.decode_engine import DecodeEngine

PORT, TOKENS, CLIENTS, REQUESTS = 8000, 12, 6, 1000
PROMPTS = [" ".join(["and God said let there be light"] * (1 + number % 9)) + f" {number}" for number in range(24)]

CODES = {"not_handed_over", "no_prefill_server", "queue_full"}
"""What a request may end with instead of its tokens."""

AGAIN = {"unreachable", "starting", "draining"}
"""Of a decode server that is not there yet, or no more: the client tries again."""


class Node:
    """A server on a machine."""

    def __init__(self, machine: Machine, artifact: Path, *options: object) -> None:
        self.machine, self.url = machine, f"http://{machine.address}:{PORT}"
        self._command = ranks.command(
            "serve", artifact, "--no-build", "--threads", 1, "--host", machine.address, "--port", PORT, "--max-queue", 400, *options
        )
        self.start()

    def start(self) -> None:
        """Starts the server; it need not be ready."""
        self.process = self.machine.popen(["sh", "-c", 'exec "$@" 2>/dev/null >/dev/null', "sh", *self._command])

    def metrics(self) -> dict[str, float]:
        """Numbers by name."""
        text = self.get("/metrics").text
        lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith("npucompile:") and "{" not in line)
        return {name.removeprefix("npucompile:"): float(value) for name, _, value in lines}

    def get(self, path: str) -> httpx.Response:
        """An answer, asked for on this machine."""
        with self.machine.inside():
            return httpx.get(self.url + path, timeout=30)

    def ready(self) -> bool:
        """Whether requests are served."""
        with contextlib.suppress(httpx.HTTPError):
            return self.get("/ready").status_code == 200
        return False


class Clients:
    """Threads that ask both decode servers, a request at a time each, until they have asked so many.

    Attributes:
        outcomes: how requests ended: "right", a code, or "connection".
    """

    def __init__(self, decodes: list[Node], expected: dict[str, str], count: int, leave: float) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[Any] = []
        self._decodes, self._expected, self._leave = decodes, expected, leave
        self._numbers = iter(range(count))
        self._lock = threading.Lock()
        self.threads = [threading.Thread(target=self._run, args=(number,)) for number in range(CLIENTS)]
        for thread in self.threads:
            thread.start()

    @property
    def done(self) -> int:
        """Requests that have ended."""
        return sum(self.outcomes.values())

    def join(self) -> None:
        """Waits for the last request."""
        for thread in self.threads:
            thread.join(300)
            assert not thread.is_alive()

    def _run(self, number: int) -> None:
        draw, node = random.Random(number), self._decodes[number % len(self._decodes)]
        with node.machine.inside(), httpx.Client(base_url=node.url, timeout=200) as client:
            while True:
                with self._lock:
                    if next(self._numbers, None) is None:
                        return
                prompt = draw.choice(PROMPTS)
                while (outcome := self._ask(client, prompt, draw)) in AGAIN:
                    time.sleep(0.5)
                with self._lock:
                    self.outcomes[outcome] += 1

    def _ask(self, client: httpx.Client, prompt: str, draw: random.Random) -> str:
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        text, reason, ended = "", "", False
        try:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    code = json.loads(answer.read())["error"]["code"]
                    return self._named(code, prompt)
                for line in answer.iter_lines():
                    if draw.random() < self._leave:
                        return "left"
                    if line == "data: [DONE]":
                        ended = True
                    elif line.startswith("data: "):
                        chunk = json.loads(line[6:])
                        if "error" in chunk:
                            return self._named(chunk["error"]["code"], prompt)
                        text += chunk["choices"][0]["text"]
                        reason = chunk["choices"][0]["finish_reason"] or reason
        except httpx.ConnectError:
            return "unreachable"
        except (httpx.HTTPError, OSError):
            # What came so far is the beginning of the answer.
            return "connection" if self._expected[prompt].startswith(text) else self._named("corrupted", prompt)
        # An end that says nothing of a fault is one of a whole answer.
        right = ended and reason == "length" and text == self._expected[prompt]
        return "right" if right else self._named(f"wrong: {text!r} {reason}", prompt)

    def _named(self, code: str, prompt: str) -> str:
        if code not in CODES | AGAIN:
            self.wrong.append((code, prompt))
        return code


class Fleet:
    """Two prefill and two decode servers."""

    def __init__(self, hosts: list[Machine], artifact: Path) -> None:
        self.prefills = [Node(host, artifact, "--role", "prefill") for host in hosts[:2]]
        urls = ",".join(node.url for node in self.prefills)
        self.decodes = [Node(host, artifact, "--role", "decode", "--prefill", urls) for host in hosts[2:]]
        self.settled()
        self.expected = {prompt: self._answer(prompt) for prompt in PROMPTS}

    @property
    def nodes(self) -> list[Node]:
        """All four."""
        return [*self.prefills, *self.decodes]

    def settled(self) -> None:
        """Waits until all are connected and nothing is held."""
        until(lambda: all(node.ready() for node in self.nodes), 120)
        until(lambda: all(node.metrics()["kv_transfer_connections"] == 2 for node in self.nodes), 120)
        names = ("kv_transfer_rooms", "num_requests_running", "num_requests_waiting")
        until(lambda: not any(node.metrics()[name] for node in self.nodes for name in names), 60)
        assert not any(node.metrics()["kv_transfer_withheld"] for node in self.decodes)

    def _answer(self, prompt: str) -> str:
        texts = set()
        for node in self.decodes:
            with node.machine.inside():
                body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
                texts.add(httpx.post(f"{node.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"])
        (text,) = texts
        return str(text)


def kill(node: Node) -> None:
    node.process.kill()
    node.process.wait()
    time.sleep(1)
    node.start()


def stop(node: Node, seconds: float = 3) -> None:
    os.kill(node.process.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(node.process.pid, signal.SIGCONT)


def stand(node: Node) -> None:
    """Longer than anybody waits for it."""
    stop(node, 120)


def cut(node: Node) -> None:
    node.machine.cut()
    time.sleep(4)
    node.machine.join()


def drain(node: Node) -> None:
    node.process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        node.process.wait(40)
    node.start()


FAULTS = {"kill": kill, "stop": stop, "stand": stand, "cut": cut, "drain": drain}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    optional.transfer_engine()
    out = tmp_path_factory.mktemp("faults") / "tiny"
    tiny.built(tiny.planned("qwen3.5-tiny", buckets=(4,), prefill=(32,), max_model_len=256), out)
    with machines(4) as hosts:
        yield Fleet(hosts, out)


@pytest.mark.long
@pytest.mark.parametrize(("role", "name"), [*itertools.product(("prefill", "decode"), FAULTS)])
def test_requests_end_right_or_with_a_named_error(fleet: Fleet, role: str, name: str) -> None:
    victims = fleet.prefills if role == "prefill" else fleet.decodes
    clients = Clients(fleet.decodes, fleet.expected, REQUESTS, leave=0.01)
    draw, faults = random.Random(f"{role} {name}"), 0
    while any(thread.is_alive() for thread in clients.threads):
        time.sleep(draw.uniform(0.2, 1.5))
        if clients.done < REQUESTS * 0.9:
            FAULTS[name](victims[faults % len(victims)])
            faults += 1
            until(lambda: all(node.ready() for node in victims) or not any(thread.is_alive() for thread in clients.threads), 120)
    clients.join()
    assert clients.wrong == []
    assert faults
    assert clients.outcomes["right"] > REQUESTS / 2, clients.outcomes
    if role == "prefill":
        # The other prefill server computed what this one had not handed over, and no stream was cut.
        assert not clients.outcomes["connection"], clients.outcomes
    fleet.settled()
    after = Clients(fleet.decodes, fleet.expected, 60, leave=0)
    after.join()
    assert after.outcomes == {"right": 60}


@pytest.mark.long
def test_a_prefill_server_that_stands_still_writes_nothing_that_was_given_back(tiny_artifact: Path) -> None:
    """Stopped before it reads where to write, it went on 55 s later, when others had the pages."""
    optional.transfer_engine()
    opened, executor = Artifact.open(tiny_artifact), CpuExecutor(Artifact.open(tiny_artifact))
    engine, pools = started(OneKind(executor, "decode")), open_pools(executor, ADDRESS)
    with contextlib.closing(servers.Server(tiny_artifact, "--no-build", "--role", "prefill")) as prefill:
        decode = DecodeEngine(engine, located(instance_of(opened.manifest), pools.ranks), pools, [prefill.http], {})
        until(lambda: decode.links[0].receiver is not None)
        granted = decode.links[0].receiver._access.grant  # type: ignore[union-attr]

        def stopping(room: Any, send: Any) -> None:
            os.kill(prefill.process.pid, signal.SIGSTOP)
            granted(room, send)

        with mock.patch.object(decode.links[0].receiver._access, "grant", stopping):  # type: ignore[union-attr]
            answer = Answer()
            decode.submit(Request("stopped", tuple(range(3, 43)), 4), answer)
            answer.wait()
        assert (answer.end and answer.end.code, answer.tokens) == ("not_handed_over", [])
        sessions = pools.sessions
        until(lambda: not decode.stats()["kv_transfer_rooms"] and not engine.stats()["num_requests_running"], 60)
        assert pools.sessions != sessions

        def memory() -> list[bytes]:
            return [hashlib.sha256((ctypes.c_ubyte * area.nbytes).from_address(area.address)).digest() for area in executor.areas]

        before = memory()
        os.kill(prefill.process.pid, signal.SIGCONT)
        until(lambda: decode.links[0].receiver is not None, 60)
        time.sleep(3)
        assert memory() == before
        again = Answer()
        decode.submit(Request("again", tuple(range(3, 43)), 4), again)
        assert again.wait().end.reason == "length"  # type: ignore[union-attr]
        engine.stepper.check()
        decode.close()
    engine.stop(drain=False)
    pools.close()
