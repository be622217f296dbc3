"""Binds the processes of ranks to cores: those of the NUMA node of each rank's device, or an even part of all."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...lowering.device import NPU
from ..host import device_node, node_cores
from ..progress import Progress
from .rank_settings import Cores, RankSettings

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
SMI_S = 10.0


def bound(settings: RankSettings, ranks: int, environment: Mapping[str, str], progress: Progress) -> RankSettings:
    """Settings with the cores of each rank of this machine, which are said.

    Args:
        ranks: of this machine.
        environment: of this process.
    """
    devices = npu_addresses(environment) if settings.device == NPU else []
    cores, said = choose_cores(ranks, devices, os.sched_getaffinity(0))
    progress.say(said)
    return replace(settings, cores=cores)


def choose_cores(ranks: int, devices: Sequence[str], allowed: Collection[int], root: Path = Path("/")) -> tuple[Cores, str]:
    """Cores of each rank of this machine, and what to say of them.

    Ranks of one node share its cores evenly. Where a device's node is not known, or has fewer cores than ranks, all ranks share all cores.

    Args:
        devices: PCI addresses of the ranks' devices, where they are known.
        allowed: cores that this process may run on.
        root: of the file system.
    """
    nodes = [device_node(root, bus) for bus in devices[:ranks]]
    sharing, cores = Counter(nodes), sorted(allowed)
    own = {node: sorted({*node_cores(root, node)} & {*cores}) if node is not None else [] for node in sharing}
    if len(nodes) == ranks and all(len(own[node]) >= sharing[node] for node in sharing):
        places = [nodes[:rank].count(nodes[rank]) for rank in range(ranks)]
        chosen = tuple(_part(own[node], place, sharing[node]) for node, place in zip(nodes, places, strict=True))
        why = "on the NUMA node of its device"
    else:
        chosen = tuple(_part(cores, rank, ranks) for rank in range(ranks))
        why = "an even part of all: no NUMA node of each device is known" if ranks > 1 else "all: no NUMA node of its device is known"
    return chosen, f"cores, {why}: " + ", ".join(f"rank {rank} on {_said(each)}" for rank, each in enumerate(chosen))


def _part(cores: Sequence[int], place: int, parts: int) -> tuple[int, ...]:
    """One of even parts; where there are fewer cores than parts, a core that others have too."""
    if len(cores) < parts:
        return (cores[place % len(cores)],)
    return tuple(cores[place * len(cores) // parts : (place + 1) * len(cores) // parts])


def _said(cores: Sequence[int]) -> str:
    """Cores in the notation of the kernel."""
    starts = [core for core in cores if core - 1 not in cores]
    ends = [core for core in cores if core + 1 not in cores]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in zip(starts, ends, strict=True))


def npu_addresses(environment: Mapping[str, str]) -> list[str]:
    """PCI addresses of the NPUs that a process sees, in the order of their numbers, not of addresses; none without npu-smi."""
    if (tool := shutil.which("npu-smi", path=environment.get("PATH"))) is None:
        return []
    try:
        done = subprocess.run([tool, "info"], env=dict(environment), capture_output=True, text=True, timeout=SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    every = re.findall(r"\b[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]\b", done.stdout)
    visible = [int(number) for number in environment.get(VISIBLE, "").split(",") if number.strip().isdecimal()]
    return [every[number] for number in visible if number < len(every)] if visible else every


def bind(cores: Cores, rank: int) -> None:
    """Binds all threads of this process, and so those that they start, where cores were chosen for its rank."""
    for task in Path("/proc/self/task").iterdir() if cores else ():
        # A thread may end meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores[rank])
