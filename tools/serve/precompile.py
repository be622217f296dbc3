"""Compiles the graphs of an artifact on devices of the building machine, and keeps them in the artifact, so that no start compiles them."""

from __future__ import annotations

from pathlib import Path

from ...graphs.errors import NpucompileError, SpecError
from ...lowering.artifact.artifact import Artifact
from ...lowering.device import CUDA, NPU, missing
from ..cli import Home
from ..progress import Progress
from .environment import applied
from .executors import AUTO, kinds_of, settled
from .launch import opened_ranks
from .rank_settings import RankSettings

NEVER = "none"


def choose_devices(requested: str, kind: str = NPU) -> str:
    """The kind of device to compile on, or "none".

    Args:
        requested: that, or "auto": the devices of this machine that the artifact is for, where it has any.
        kind: that the artifact is for.
    """
    return (NEVER if missing(kind) else kind) if requested == AUTO else requested


def precompile(home: Home, path: Path, requested: str, progress: Progress) -> str:
    """Starts the ranks of an artifact once, on random weights where it has none, and has them keep what they compile in the artifact.

    Args:
        requested: as for `choose_devices`; with "auto" a failure is said, and the first start compiles instead.

    Returns:
        The kind of device that the graphs were compiled on, or "none".

    Raises:
        SpecError: the artifact has neither GE graphs nor graphs for a GPU, or they are for another kind of device.
        ArtifactError: this machine has no such device.
        LoweringError: a graph cannot be compiled, and serving needs it.
        RankError: a rank was lost.
    """
    if requested == NEVER or (requested == AUTO and missing(NPU) and missing(CUDA)):
        return NEVER
    artifact = Artifact.open(path, check=False)
    if (kind := choose_devices(requested, CUDA if CUDA in kinds_of(artifact) else NPU)) == NEVER:
        return kind
    if artifact.manifest.backend not in ("ge", "inductor_cuda"):
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
