"""Reads from the environment which rank a launcher such as torchrun made this process."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ...graphs.errors import SpecError
from ...runtime.distributed.nodes import ClusterNode
from ...runtime.distributed.rendezvous import RendezvousConfig
from .nodes import LOOPBACK, TOKEN_VARIABLE, located
from .rank_settings import RankSettings

log = logging.getLogger(__name__)

GROUP = {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
"""torchrun's number of this machine, and of machines, and what they are where another launcher sets neither."""


def launcher_config(environment: Mapping[str, str], settings: RankSettings) -> RendezvousConfig | None:
    """The rank that torchrun, or a launcher that sets the same variables, made this process; None without a launcher.

    Raises:
        SpecError: variables are missing or are not numbers, or as `nodes.located`.
        RankError: as `nodes.located`.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise SpecError(f"RANK and WORLD_SIZE are set, and {' and '.join(missing)} is not; torchrun sets all four, or set none")
    rank, size, port = (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank >= size:
        raise SpecError(f"RANK is {rank} and WORLD_SIZE {size}; legal is 0 to {size - 1}")
    token = environment.get(TOKEN_VARIABLE, "")
    if not (rank or token or environment["MASTER_ADDR"] in LOOPBACK):
        log.warning("ranks meet at %s without $%s: whoever reaches it can join them", environment["MASTER_ADDR"], TOKEN_VARIABLE)
    local_size = _number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else size
    run, restart = environment.get("TORCHELASTIC_RUN_ID", ""), environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    agent_hosts_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    machine, machines = (_number(environment, name) if name in environment else default for name, default in GROUP.items())
    config = RendezvousConfig(
        rank,
        size,
        environment["MASTER_ADDR"],
        port,
        local_size,
        settings.join_timeout_s,
        prefix=f"npucompile/{run}/{restart}",
        hosts_store=rank == 0 and not agent_hosts_store,
        local_rank=_number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else rank % local_size,
        token=token,
        node=ClusterNode(machine, machines),
    )
    return config if machines == 1 else located(config, settings.host_address)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdecimal()):
        raise SpecError(f"{name} is {text!r}; legal is a whole number")
    return int(text)
