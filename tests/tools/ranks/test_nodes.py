"""tools/ranks/nodes.py: what a user says of his machines is checked, and the address of this one found."""

from __future__ import annotations

import re

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.graphs.types import Mesh
from npucompile.runtime.distributed.nodes import ClusterNode
from npucompile.tools.ranks import nodes as module
from npucompile.tools.ranks.nodes import TOKEN_VARIABLE, NodeOptions, interfaces, node_config, read_token, said_of

TOKEN = {TOKEN_VARIABLE: "secret"}
MESH = Mesh.parse("dp=2,tp=2")


def config_of(options, mesh=MESH, environment=TOKEN, host_address=None):
    return node_config(options, mesh, environment, 7, host_address)


def test_each_machine_has_its_share_of_the_ranks(monkeypatch):
    monkeypatch.setattr(module.socket, "gethostname", lambda: "here")
    assert config_of(NodeOptions()) is None
    first, second = (config_of(NodeOptions(2, rank, "127.0.0.1:4000")) for rank in (0, 1))
    assert (first.rank, first.hosts_store, first.node) == (0, True, ClusterNode(0, 2, "here", "127.0.0.1"))
    assert (second.rank, second.hosts_store, second.node) == (2, False, ClusterNode(1, 2, "here", "127.0.0.1"))
    for config in (first, second):
        assert (config.world_size, config.local_world_size, config.local_rank, config.starts_ranks) == (4, 2, 0, True)
        assert (config.host, config.port, config.timeout_s, config.token) == ("127.0.0.1", 4000, 7, "secret")
    words = "node rank 1 (here at 127.0.0.1) of 2: ranks 2, 3; meets the others at 127.0.0.1 port 4000 on lo"
    assert said_of(second) == words
    assert interfaces()["lo"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("place", "host", "port"),
    [("127.0.0.1", "127.0.0.1", 29500), ("localhost:1", "localhost", 1), ("[::1]:77", "::1", 77), ("::1", "::1", 29500)],
)
def test_where_machines_meet(place, host, port):
    config = config_of(NodeOptions(2, 1, place), host_address="127.0.0.1")
    assert (config.host, config.port) == (host, port)


def test_an_address_that_a_user_says_is_that_of_all_sockets():
    other = config_of(NodeOptions(2, 1, "192.0.2.1"), host_address="127.0.0.3")
    assert (other.host, other.node.address) == ("192.0.2.1", "127.0.0.3")
    # The first machine listens there, whatever the others call it.
    first = config_of(NodeOptions(2, 0, "a-name-that-is-not-looked-up"), host_address="127.0.0.3")
    assert (first.host, first.node.address) == ("127.0.0.3", "127.0.0.3")


@pytest.mark.parametrize(
    ("options", "mesh", "environment", "host_address", "message"),
    [
        (NodeOptions(2, 2, "h"), MESH, TOKEN, None, "--node-rank 2 with --nnodes 2; legal is 0 to 1 [node_rank]"),
        (NodeOptions(1, 1), MESH, TOKEN, None, "--node-rank 1 with --nnodes 1; legal is 0 to 0 [node_rank]"),
        (NodeOptions(3, 1, "h"), MESH, TOKEN, None,
         "mesh dp=2,tp=2 has 4 ranks, which 3 machines (--nnodes) cannot share evenly; legal are 1, "
         "2, 4 machines [nnodes]"),
        (NodeOptions(2, 1, "h"), Mesh.parse(""), TOKEN, None, "mesh 1 has 1 rank, which 2 machines (--nnodes) cannot share evenly"),
        (NodeOptions(2, 1), MESH, TOKEN, None, "--nnodes 2 without --master-addr; legal is HOST[:PORT] of --node-rank 0"),
        (NodeOptions(2, 1, "h"), MESH, {}, None, "--nnodes 2 without a token: whoever reaches node rank 0 could join; legal is $NPU"),
        (NodeOptions(2, 1, "h:port"), MESH, TOKEN, None, "--master-addr h:port; legal is HOST or HOST:PORT of --node-rank 0 [master_addr]"),
        (NodeOptions(2, 1, ":1"), MESH, TOKEN, None, "--master-addr :1; legal is"),
        (NodeOptions(2, 1, "a.name.invalid"), MESH, TOKEN, None, "a.name.invalid, where node rank 0 is, is no name that"),
        (NodeOptions(2, 1, "h"), MESH, TOKEN, "192.0.2.1", "--host-address 192.0.2.1 is no address of this machine"),
    ],
)  # fmt: skip
def test_what_is_not_legal_is_refused(options, mesh, environment, host_address, message):
    with pytest.raises(SpecError, match=re.escape(message)):
        config_of(options, mesh, environment, host_address)


def test_the_first_machine_is_where_the_others_look_for_it(monkeypatch):
    monkeypatch.setattr(module, "_route", lambda host, port: ("10.0.0.9", "10.0.0.2"))
    with pytest.raises(SpecError, match=r"node rank 0 listens at 10.0.0.9, which is no address of this machine: .* at 10.0.0.2; legal is"):
        config_of(NodeOptions(2, 0, "other"))
    monkeypatch.setattr(module, "_route", lambda host, port: ("127.0.1.1", "127.0.0.1"))
    with pytest.raises(
        SpecError, match=r"^name is 127.0.1.1 in the hosts file of .*, which other machines do not reach; legal is an address"
    ):
        config_of(NodeOptions(2, 0, "name"))
    # A rehearsal of several machines on one says so.
    assert config_of(NodeOptions(2, 0, "127.0.1.1")).node.address == "127.0.1.1"


def test_the_token_is_of_a_file_or_of_the_environment(tmp_path):
    file = tmp_path / "token"
    with pytest.raises(SpecError, match=r"--rank-token: .*token cannot be read: No such file or directory \[rank_token\]"):
        read_token(file, TOKEN)
    file.write_text(" \n")
    with pytest.raises(SpecError, match=r"token is empty; legal is what `openssl rand -hex 16` draws"):
        read_token(file, TOKEN)
    file.write_text("of the file\n")
    assert read_token(file, TOKEN) == "of the file"
    assert (read_token(None, TOKEN), read_token(None, {})) == ("secret", "")
