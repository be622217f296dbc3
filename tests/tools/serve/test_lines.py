"""tools/serve/lines.py: what starts a server, a pair, a published deployment: a line a machine."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from npucompile.models import registry
from npucompile.tools.builder.deployments import deployment, deployments
from npucompile.tools.commands import build, serve
from npucompile.tools.serve.lines import NAMES, PAIRS_ITSELF, TOKEN, Server, lines_of, of_built, paired
from npucompile.tools.serve.pairing import Pairing

ROWS = [row for row in deployments().values() if row.phases]
PAIRS = [row for row in ROWS if "prefill" in row.phases]
DENSE = [
    row for row in ROWS
    if row.model in registry.presets() and row.nodes == 1 and row.phase().mesh.axis("dp") > 1
    and not getattr(registry.find(row.model).model.config, "num_experts", 0)
]  # fmt: skip


def test_one_server_is_one_line():
    server = Server("an artifact", options=(("--port", "1"),), variables={"A": "b c"})
    assert server.lines() == ["A='b c' npucompile serve 'an artifact' --port 1"]
    assert server.url == "http://HOST:1"


@pytest.mark.parametrize(
    ("server", "url"),
    [
        (Server("a", "prefill"), "http://PREFILL:8000"),
        (Server("a", "prefill", options=(("--host", "0.0.0.0", "--port", "7"),)), "http://PREFILL:7"),
        (Server("a", "prefill", options=(("--host", "10.0.0.1"),)), "http://10.0.0.1:8000"),
        (Server("a", "prefill", ("one", "two"), (("--host", "0.0.0.0"),)), "http://one:8000"),
    ],
)
def test_a_server_is_reached_by_what_others_can_reach(server, url):
    assert server.url == url


def test_several_machines_meet_at_the_first_or_where_they_are_told():
    server = Server("a", machines=("one", "two"), options=(("--host", "one"), ("--host", "two")))
    assert server.lines() == [
        "npucompile serve a --host one --nnodes 2 --node-rank 0 --master-addr one",
        "npucompile serve a --host two --nnodes 2 --node-rank 1 --master-addr one",
    ]
    (first, second) = Server("a", machines=("one", "two"), master="three:5").lines()
    assert first.endswith("--node-rank 0 --master-addr three:5")
    assert second.endswith("--node-rank 1 --master-addr three:5")


@pytest.mark.parametrize(
    ("host", "more"),
    [("one.example.org", " --allowed-host one.example.org"), ("10.0.0.1", ""), ("PREFILL1", ""), ("$local_ip", ""), ("localhost", "")],
)
def test_a_prefill_server_that_has_a_name_takes_it_from_others(host, more):
    (line,) = Server("p", "prefill", (host,)).lines()
    assert line == f"npucompile serve p --role prefill{more}"
    assert Server("d", "decode", (host,), prefill=("http://a:1",)).lines() == ["npucompile serve d --role decode --prefill http://a:1"]
    first, second = Server("p", "prefill", (host, "two")).lines()
    assert first.removesuffix(f" --nnodes 2 --node-rank 0 --master-addr {shlex.quote(host)}") == line
    assert "--allowed-host" not in second


def test_who_decodes_knows_who_prefills():
    servers = paired([Server("d", "decode"), Server("p", "prefill", ("one",)), Server("p", "prefill", ("two",)), Server("m")])
    assert servers[0].lines() == ["npucompile serve d --role decode --prefill http://one:8000,http://two:8000"]
    assert servers[3] == Server("m")
    (alone,) = paired([Server("d", "decode")])
    assert alone.prefill == ("http://PREFILL:8000",)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_published_deployment_has_a_line_a_machine(row):
    found = lines_of(row)
    assert len(found.lines) == row.nodes
    assert {server.role for server in found.servers} == ({"both"} if "mixed" in row.phases else {"prefill", "decode"})
    words = shlex.split(found.build)[2:]
    assert build.command.make_context("build", words).params["deployment"] == row.id
    several = {server.artifact: server for server in found.servers if len(server.machines) > 1}
    assert sorted(len(server.machines) for server in several.values()) == sorted(
        phase.nodes for phase in row.phases.values() if phase.nodes > 1
    )
    for server in several.values():
        assert [line.partition("--node-rank ")[2] for line in server.lines()] == [
            f"{rank} --master-addr {server.machines[0]}" for rank in (0, 1)
        ]


@pytest.mark.parametrize("row", PAIRS, ids=lambda row: row.id)
def test_a_published_pair_names_every_prefill_server(row):
    found = lines_of(row, {"prefill": "here/p", "decode": "here/d"})
    prefill, decode = ([server for server in found.servers if server.role == role] for role in ("prefill", "decode"))
    assert len(prefill) == row.phases["prefill"].instances
    assert {server.prefill for server in decode} == {tuple(server.url for server in prefill)}
    assert len({server.url for server in found.servers}) == len(found.servers)
    assert [server.artifact for server in found.servers] == ["here/p"] * len(prefill) + ["here/d"] * len(decode)
    said = [line.strip() for line in found.shown()]
    assert PAIRS_ITSELF in said
    assert (TOKEN in said) == any(len(server.machines) > 1 for server in found.servers)
    assert said[-1] == NAMES
    for server in found.servers:
        words = shlex.split(server.lines()[0])[2:]
        params = serve.command.make_context("serve", [*words, "--host-address", "10.0.0.1"]).params
        pairing = Pairing.of(params, params["host"], ())
        assert (pairing.role, pairing.prefill) == (server.role, server.prefill)


def test_the_lines_of_a_pair_as_they_are_documented():
    assert lines_of(deployment("dsr1-a3x16-pd-2k-2k-50ms")).lines == [
        "npucompile serve deepseek-r1-prefill --role prefill --host PREFILL1 --port 8000",
        "npucompile serve deepseek-r1-decode --role decode --prefill http://PREFILL1:8000 --host DECODE1 --port 8001",
    ]


def test_the_four_dense_deployments_may_be_replicas():
    assert len(DENSE) == 4
    for row in DENSE:
        mesh = row.phase().mesh
        made, *lines, router = lines_of(row, dense=True).replicas
        assert len(lines) == mesh.axis("dp")
        params = build.command.make_context("build", shlex.split(made)[2:]).params
        assert params["mesh"] == f"dp=1,tp={mesh.axis('tp')}"
        ports, devices = [], []
        for line in lines:
            variable, *words = shlex.split(line)
            devices += variable.removeprefix("ASCEND_RT_VISIBLE_DEVICES=").split(",")
            params = serve.command.make_context("serve", words[2:]).params
            ports.append(params["port"])
        assert devices == [str(number) for number in range(mesh.size)]
        assert len({*ports, 8000}) == len(lines) + 1
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        assert shlex.split(router) == [
            *("python", "-m", "sglang_router.launch_router", "--worker-urls"),
            *urls,
            *("--policy", "cache_aware", "--health-check-endpoint", "/ready", "--host", "127.0.0.1", "--port", "8000"),
        ]
    assert all(not lines_of(row, dense=False).replicas for row in ROWS)


def test_a_build_says_what_serves_its_artifacts():
    paths = [Path("here/r1-prefill"), Path("here/r1-decode")]
    row = deployment("dsr1-a3x32-pd-6k-1.6k-20ms")
    shown = of_built(row.id, None, paths)
    assert shown[0] == "serve them, a line a machine:"
    assert [line.strip() for line in shown[1:5]] == lines_of(row, dict(zip(row.phases, map(str, paths), strict=True))).lines
    alone = of_built(row.id, "prefill", paths[:1])
    assert [line.strip() for line in alone[1:3]] == [line.strip() for line in shown[1:3]]
    assert len(alone) == len(shown) - 2
    assert of_built("qwen35-397b-a3x8-in16k-out1k-50ms", None, paths[:1]) == []
    assert len(of_built("qwen3-480b-a3x16-mix-3.5k-1.5k-50ms", None, paths[:1])) == 5
