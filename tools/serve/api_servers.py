"""How many processes speak with clients where `--api-servers` is auto, and why."""

from __future__ import annotations

from typing import NamedTuple

from ...graphs.types import Mesh
from ...lowering.artifact.artifact import Artifact

NPU = "npu"

STREAMS = 100
"""At once, from which on a process of its own pays: 512 cost a process that also steps 20 ms a step."""

CORES = 4
"""For the thread that steps, its device, a door, and what else a machine runs; and one more for each further rank."""


class Chosen(NamedTuple):
    """How many, and why; "" where nothing was to be chosen."""

    doors: int
    why: str


def chosen(artifact: Artifact, cores: int, ranks: int) -> Chosen:
    """What auto comes to for an artifact that NPUs run; elsewhere a step takes longer than what is said of it.

    More than 1 is for who has measured that a door is the bound.

    Args:
        cores: of this machine, that this process may use.
        ranks: on this machine.
    """
    manifest = artifact.manifest
    groups, rows = Mesh.parse(manifest.mesh).axis("dp"), manifest.limits.num_request_slots - 1
    streams, needed = groups * rows, CORES + ranks - 1
    load = f"{streams} streams at once ({groups} dp groups of {rows})"
    if streams < STREAMS:
        return Chosen(0, f"{load}, and a process of its own pays from {STREAMS} on")
    if cores < needed:
        return Chosen(0, f"{load}, and {cores} cores, where {ranks} ranks and one process more want {needed}")
    return Chosen(1, f"{load}, and {cores} cores")


def said_of_choice(choice: Chosen) -> tuple[str, ...]:
    """The line that a server says of it, where there was something to choose."""
    return (f"--api-servers auto: {choice.doors}, for {choice.why}",) if choice.why else ()
