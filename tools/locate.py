"""Finds artifacts: by path, by the name of a built model, or the newest one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..graphs.errors import ArtifactMissing, ArtifactStale, NpucompileError
from ..graphs.paths import directory_named, file_named
from ..lowering.artifact.artifact import MANIFEST, Artifact
from ..models.directories import HUB_NAME
from ..models.family_file import FamilyFile


def artifact_path(artifacts: Path, name: str | None) -> Path:
    """The directory of an artifact.

    Args:
        artifacts: the default directory of builds.
        name: a path, the name of a built model, or None for the newest artifact.

    Raises:
        ArtifactMissing: naming the artifacts there are.
    """
    built = sorted(p.parent for p in artifacts.glob(f"*/{MANIFEST}"))
    if name is None:
        if not built:
            raise ArtifactMissing(f"no artifact under {artifacts}; `npucompile build MODEL` makes one")
        return max(built, key=lambda path: (path / MANIFEST).stat().st_mtime_ns)
    for path in (directory_named(name), artifacts / name, _of_hub(artifacts, name)):
        if path and file_named(path / MANIFEST):
            return path
    names = ", ".join(path.name for path in built) or "nothing"
    raise ArtifactMissing(f"{name!r} is neither an artifact directory nor a built model; built under {artifacts}: {names}")


def _of_hub(artifacts: Path, name: str) -> Path | None:
    """The artifact of the model that a hub's name stands for, at any revision or at the one that the name has."""
    found = HUB_NAME.fullmatch(name)
    path = artifacts / found["model"] if found else artifacts
    if found is None or not (path / MANIFEST).is_file():
        return None
    origin = Artifact.open(path).manifest.model.get("origin", {})
    same = origin.get("name") == found["name"] and found["revision"] in (None, origin.get("revision"))
    return path if same else None


def check_family(artifact: Artifact, file: str) -> None:
    """Refuses an artifact that was not built with the family of a user's file.

    Raises:
        ArtifactStale: naming both families.
        FamilyError: the file cannot be read.
    """
    named, built = FamilyFile.read(file), FamilyFile.recorded(artifact.manifest.model)
    if built is None:
        raise ArtifactStale(
            f"{artifact.path} was built with npucompile's family {artifact.manifest.model['family']}, not {file}; build it again"
        )
    if built.digest != named.digest:
        raise ArtifactStale(
            f"{artifact.path} was built with the family file {built.path} of sha256 {built.digest[:16]}, and {named.path} is "
            f"{named.digest[:16]}; build it again"
        )


def newest_runnable(artifacts: Path, check: Callable[[Artifact], object]) -> tuple[Artifact | None, list[str]]:
    """The newest artifact that this machine can run and serve text with, and the reasons why newer ones were skipped.

    Args:
        check: raises an NpucompileError for an artifact that cannot run, or has no weights.
    """
    skipped = []
    built = sorted(artifacts.glob(f"*/{MANIFEST}"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for manifest in built:
        try:
            artifact = Artifact.open(manifest.parent)
            artifact.check_runnable()
            check(artifact)
        except NpucompileError as error:
            skipped.append(str(error))
            continue
        if artifact.manifest.tokenizer is None:
            skipped.append(f"{manifest.parent} was built without tokenizer")
            continue
        return artifact, skipped
    return None, skipped
