"""tools/ranks/torchrun.py: the environment of a launcher is read, or refused where it makes no sense."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.runtime.distributed.rendezvous import RendezvousConfig
from npucompile.tools.ranks.rank_settings import RankSettings
from npucompile.tools.ranks.torchrun import launcher_config

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def test_a_process_by_itself_has_no_launcher():
    assert launcher_config({}, RankSettings()) is None
    assert launcher_config({"RANK": "3"}, RankSettings()) is None


def test_the_configuration_of_torchrun():
    settings = RankSettings(join_timeout_s=7)
    assert launcher_config(TORCHRUN, settings) == RendezvousConfig(
        1, 4, "node0", 29500, 4, 7, "npucompile//0", hosts_store=False, local_rank=1
    )
    own = launcher_config(TORCHRUN | {"RANK": "0", "LOCAL_WORLD_SIZE": "2"}, settings)
    assert (own.hosts_store, own.local_world_size) == (True, 2)
    # Machines of two ranks each: a device is chosen by the number on the machine, which a launcher may also say itself.
    third = TORCHRUN | {"RANK": "3", "LOCAL_WORLD_SIZE": "2"}
    assert launcher_config(third, settings).local_rank == 1
    assert launcher_config(third | {"LOCAL_RANK": "0"}, settings).local_rank == 0
    agent = {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"}
    restarted = launcher_config(TORCHRUN | agent, settings)
    assert (restarted.hosts_store, restarted.prefix) == (False, "npucompile/job/2")


def test_machines_of_torchrun_are_located():
    several = TORCHRUN | {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "NPUCOMPILE_RANK_TOKEN": "secret"}
    config = launcher_config(several, RankSettings(host_address="127.0.0.3"))
    assert (config.node.rank, config.node.count, config.node.address, config.host) == (1, 2, "127.0.0.3", "node0")
    assert not config.starts_ranks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_ADDR": ""}, "RANK and WORLD_SIZE are set, and MASTER_ADDR is not; torchrun sets all four, or set none"),
        ({"RANK": "one"}, "RANK is 'one'; legal is a whole number"),
        ({"RANK": "4"}, "RANK is 4 and WORLD_SIZE 4; legal is 0 to 3"),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE is 'x'"),
    ],
)
def test_a_launcher_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        launcher_config(TORCHRUN | changes, RankSettings())


def test_ranks_that_anyone_could_join_are_told_of_a_token(caplog):
    machine = TORCHRUN | {"RANK": "0"}
    assert launcher_config(machine, RankSettings()).token == ""
    assert "ranks meet at node0 without $NPUCOMPILE_RANK_TOKEN" in caplog.text
    caplog.clear()
    assert launcher_config(machine | {"NPUCOMPILE_RANK_TOKEN": "secret"}, RankSettings()).token == "secret"
    launcher_config(machine | {"MASTER_ADDR": "127.0.0.1"}, RankSettings())
    launcher_config(TORCHRUN, RankSettings())
    assert caplog.text == ""
