"""tools/serve/pairing.py: roles from options, and a pair from two commands."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fleet import until
from support.servers import Server

from npucompile.graphs.errors import SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.kv_transfer.opening import open_pools
from npucompile.runtime.kv_transfer.pools import Pools
from npucompile.runtime.kv_transfer.transfer_engine import Segment
from npucompile.runtime.request import FinishEvent, Request
from npucompile.tools.serve.options import OPTIONS
from npucompile.tools.serve.pairing import Pairing, transfer_variables
from npucompile.tools.serve.serving import start_service
from tests.support import optional

DEFAULTS = {option.name: option.default for option in OPTIONS} | {"record": None, "prefill": None, "host_address": None}


def pairing(host: str = "127.0.0.1", keys: tuple[str, ...] = (), **options: Any) -> Pairing:
    return Pairing.of(DEFAULTS | options, host, keys)


def test_a_decode_server_writes_and_shows_keys_by_what_it_is_told() -> None:
    pair = pairing(role="decode", prefill="http://127.0.0.1:1/, http://localhost:2", keys=("first", "second"), handover_timeout=7.0)
    assert (pair.prefill, pair.host, pair.key) == (("http://127.0.0.1:1", "http://localhost:2"), "127.0.0.1", "first")
    assert pair.timeouts[:3] == (7, 7, 7)
    assert pairing("10.1.2.3", role="prefill").host == "10.1.2.3"
    assert pairing("0.0.0.0", role="prefill").host == "127.0.0.1"
    assert pairing("0.0.0.0", role="prefill", host_address="10.0.0.9").host == "10.0.0.9"
    assert pairing() == Pairing(host="127.0.0.1")


def test_what_is_open_to_strangers_is_said(tiny_artifact: Path) -> None:
    artifact = Artifact.open(tiny_artifact)
    assert pairing().notes(None, artifact) == []
    for port, text in ((None, "of 15000 to 17000"), (20_000, "of 20000 to 20007")):
        (note,) = pairing(role="prefill").notes(port, artifact)
        assert text in note
        assert "read and write this server's memory" in note


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"role": "decode"}, "--role decode without --prefill"),
        ({"prefill": "http://a:1"}, "--role both with --prefill http://a:1"),
        ({"role": "prefill", "prefill": "http://a:1"}, "--role prefill with --prefill"),
        ({"role": "decode", "prefill": "a:1"}, "legal are URLs like"),
        ({"role": "decode", "prefill": "http://no-such-name.invalid:1"}, "no-such-name.invalid"),
        ({"role": "decode", "prefill": "http://127.0.0.1:1", "record": Path("x")}, "--record with --role decode"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        pairing(**options)


@pytest.mark.parametrize(
    ("role", "kinds", "text"),
    [
        ("both", ["prefill"], "has no decode bucket; legal is `--role prefill`"),
        ("both", ["decode"], "has no prefill bucket; legal is `--role decode`"),
        ("decode", ["prefill"], "--role decode: .* has no decode bucket"),
        ("prefill", ["prefill"], ""),
        ("decode", ["decode"], ""),
        ("decode", ["prefill", "decode"], ""),
    ],
)
def test_a_role_needs_its_kind_of_bucket(role: str, kinds: list[str], text: str) -> None:
    graphs = [SimpleNamespace(bucket=SimpleNamespace(kind=kind)) for kind in kinds]
    artifact: Any = SimpleNamespace(path="a", manifest=SimpleNamespace(graphs=graphs))
    if text:
        with pytest.raises(SpecError, match=text):
            Pairing(role).check(artifact)
    else:
        Pairing(role).check(artifact)


def test_the_place_decides_how_bytes_move_where_nobody_says(tiny_artifact: Path) -> None:
    artifact = Artifact.open(tiny_artifact)
    assert [Pairing("prefill").settled(artifact, device, None).protocol for device in ("npu", "emulated", "cpu")] == [
        "ascend",
        "tcp",
        "tcp",
    ]
    asked = pairing(role="prefill", transfer_protocol="rdma").settled(artifact, "npu", None)
    assert (asked.protocol, asked.source) == ("rdma", artifact.manifest.source_digest)
    assert Pairing().settled(artifact, "npu", None) == Pairing()


def test_the_thread_that_steps_opens_the_pools(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines belong to the device of the thread that starts them; those that write are made to be of it."""
    optional.transfer_engine()
    opened, entered, steps = list[str](), set[str](), set[str]()

    class Executor(CpuExecutor):
        def enter(self) -> None:
            entered.add(threading.current_thread().name)

        def launch(self, *step: Any) -> Any:
            steps.add(threading.current_thread().name)
            return super().launch(*step)

    def open_here(*arguments: Any) -> Pools:
        opened.append(threading.current_thread().name)
        return open_pools(*arguments)

    monkeypatch.setattr("npucompile.tools.serve.pairing.open_pools", open_here)
    artifact = Artifact.open(tiny_artifact)
    running = start_service(artifact, lambda: Executor(artifact), pairing=Pairing("prefill", host="127.0.0.1", protocol="tcp"))
    ended = threading.Event()
    running.engine.submit(Request("r", (1, 2, 3), 2), lambda event: ended.set() if isinstance(event, FinishEvent) else None)
    assert ended.wait(60)
    assert set(opened) == steps != set()
    assert len(opened) == 1
    engine = running.service.handovers._pools._writer.transfer
    (area, *_) = running.engine.executor.areas
    engine.write(engine.session, [Segment(area.address, area.address, 8)], lambda: True).result()
    assert {name.rpartition("_")[0] for name in entered} == {"kv-transfer"}
    running.engine.stop()
    running.closing.close()


def test_ports_are_taken_from_a_first_one_on(tiny_artifact: Path) -> None:
    artifact = Artifact.open(tiny_artifact)
    assert transfer_variables(None, artifact) == {}
    assert transfer_variables(9000, artifact) == {"MC_MIN_RPC_PORT": "9000", "MC_MAX_RPC_PORT": "9007"}


@pytest.fixture
def pair(tiny_artifact: Path) -> Iterator[tuple[Server, Server, Server]]:
    """A prefill server, its decode server, and one of both."""
    optional.transfer_engine()
    prefill = Server(tiny_artifact, "--no-build", "--role", "prefill")
    decode = Server(tiny_artifact, "--no-build", "--role", "decode", "--prefill", prefill.http)
    servers = prefill, decode, Server(tiny_artifact, "--no-build")
    yield servers
    for server in servers:
        server.close()


def test_two_commands_are_a_pair(pair: tuple[Server, Server, Server]) -> None:
    prefill, decode, both = pair
    prompt = [5 + place % 40 for place in range(39)]
    until(lambda: "kv_transfer_connections 1.0" in decode.metrics())
    assert asyncio.run(decode.ask(20, prompt)) == asyncio.run(both.ask(20, prompt))
    assert "npucompile:kv_transfer_requests_total 1.0" in decode.metrics()
    assert "npucompile:kv_transfer_rooms 0.0" in prefill.metrics()
    assert 'npucompile:bucket_steps_total{bucket="prefill' in prefill.metrics()
    assert all("npucompile:compiles_after_ready_total 0" in server.metrics() for server in pair)
