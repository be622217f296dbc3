"""Compiles the graphs of an artifact on devices of the building machine, and keeps them in the artifact, so that no start compiles them."""

from __future__ import annotations

from pathlib import Path

from ...graphs.errors import NpucompileError, SpecError
from ...lowering.artifact.artifact import Artifact
from ...lowering.device import NPU, missing
from ..cli import Home
from ..progress import Progress
from .environment import applied
from .executors import AUTO, settled
from .launch import opened_ranks
from .rank_settings import RankSettings

NEVER = "none"


def choose_devices(requested: str) -> str:
    """The kind of device to compile on, or "none".

    Args:
        requested: that, or "auto": the NPUs of this machine, where it has any.
    """
    return (NEVER if missing(NPU) else NPU) if requested == AUTO else requested


def precompile(home: Home, path: Path, requested: str, progress: Progress) -> str:
    """Starts the ranks of an artifact once, on random weights where it has none, and has them keep what they compile in the artifact.

    Args:
        requested: as for `choose_devices`; with "auto" a failure is said, and the first start compiles instead.

    Returns:
        The kind of device that the graphs were compiled on, or "none".

    Raises:
        SpecError: the artifact has no GE graphs.
        ArtifactError: this machine has no such device.
        LoweringError: a graph cannot be compiled, and serving needs it.
        RankError: a rank was lost.
    """
    if (kind := choose_devices(requested)) == NEVER:
        return kind
    artifact = Artifact.open(path, check=False)
    if artifact.manifest.backend != "ge":
        if requested == AUTO:
            return NEVER
        captured = " and built with --backend aclgraph, whose graphs no device can store" if artifact.manifest.backend == "aclgraph" else ""
        raise SpecError(f"--precompile {requested}: {path} is for {artifact.manifest.target}{captured}; legal are {AUTO} and {NEVER}")
    try:
        _compile(home, artifact, kind, progress)
    except NpucompileError as error:
        if requested != AUTO:
            raise
        progress.say(f"not compiled for the device yet, the first start does it: {error}")
        return NEVER
    return kind


def _compile(home: Home, artifact: Artifact, kind: str, progress: Progress) -> None:
    bare = artifact.manifest.weights is None and artifact.manifest.checkpoint is None
    settings = settled(artifact, RankSettings(device=kind, random_weights=bare, ship_compiled=True))
    home = applied(home, artifact, settings, progress)
    with opened_ranks(artifact, None, settings, home.environment, progress) as load_executor:
        load_executor()
