"""Stamps: digests of what decides a build, or one of its buckets, taken before anything is traced or torch is loaded.

Equal stamps need not be built again. What has another stamp is staged, and compiled only if its graph has another key
(lowering/artifact/artifact.py, `graph_key`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

STAMP = ".{name}.stamp.json"
"""Beside the manifest, and no part of the artifact: it names times. Nothing is served or trusted for it; it spares a build."""
MANIFEST = "manifest.msgpack"
FORMAT = 1

FOLDERS = ("graphs", "models", "lowering", "runtime", "server", "tools")
BUNDLED = "models/bundled"
SOURCES = (".py", ".json", ".cpp", ".h")
"""What the package is made of, but for bundled models."""
DISTRIBUTIONS = (
    "torch", "torch_npu", "protobuf", "safetensors", "msgpack", "numpy", "tokenizers", "packaging", "PyYAML", "click", "npucompile",
)  # fmt: skip
"""Whose versions decide what a build makes; one that is not installed counts too."""


GRAPH_SOURCES = ("graphs", "models", "lowering", "tools/build/stages.py", "tools/build/pool.py")
"""Folders and files that decide what a graph is, and what an artifact keeps of it."""


@functools.cache
def source_digest(root: Path = ROOT) -> str:
    """sha256 of the names and contents of all Python files that decide graphs."""
    digest = hashlib.sha256()
    for part in GRAPH_SOURCES:
        place = root / part
        for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
            digest.update(f"{file.relative_to(root).as_posix()} {_sha256(file)}\0".encode())
    return digest.hexdigest()


def bucket_stamp(*facts: object) -> str:
    """Digest of one bucket: the sources that decide graphs, and facts whose `repr` says all that they decide."""
    return hashlib.sha256(repr((source_digest(), *facts)).encode()).hexdigest()


def fingerprint(options: Mapping[str, Any], package_root: Path, model_files: Iterable[Path]) -> str:
    """Digest of all that decides a build: equal fingerprints need not be built again.

    Sources of the package count by content; models, which may be large, by size and time of change.

    Args:
        options: of the command, and whatever else of the surroundings decides (an environment variable, say); None is as good as absent.
        package_root: where npucompile's folders are.
        model_files: files and directories of the checkpoint, with what is in them; none for a preset without one.
    """
    digest = hashlib.sha256()
    for told in (_options(options), *_sources(package_root), *_models(package_root / BUNDLED, *model_files), *_machine()):
        # The length keeps one thing's end from being the next one's beginning.
        digest.update(f"{len(told)}:".encode() + told)
    return digest.hexdigest()


def matches(artifact_dir: Path, fingerprint: str) -> bool:
    """Whether the artifact there was built by a build of this fingerprint, and its files are still those it left."""
    try:
        stamp = json.loads(stamp_file(artifact_dir).read_bytes())
        if stamp["format"] != FORMAT or stamp["fingerprint"] != fingerprint or stamp["manifest"] != _sha256(artifact_dir / MANIFEST):
            return False
        return all(_state(artifact_dir / name) == state for name, state in stamp["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # No stamp, or none that can be read, is as good as an old one: the build looks for itself.
        return False


def write(artifact_dir: Path, fingerprint: str, files: Iterable[str]) -> None:
    """Leaves a stamp beside an artifact that a build has just finished or found complete.

    Args:
        files: names of its files in the directory; the manifest need not be among them.

    Raises:
        OSError: one is not there.
    """
    states = {name: _state(artifact_dir / name) for name in sorted(files)}
    told = {"format": FORMAT, "fingerprint": fingerprint, "manifest": _sha256(artifact_dir / MANIFEST), "files": states}
    file = stamp_file(artifact_dir)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(told, indent=1, sort_keys=True), encoding="utf-8")
    os.replace(part, file)


def stamp_file(artifact_dir: Path) -> Path:
    """Where the stamp lies: beside the artifact, whose own bytes do not depend on when it was built."""
    return artifact_dir.with_name(STAMP.format(name=artifact_dir.name))


def _options(options: Mapping[str, Any]) -> bytes:
    given = {name: value for name, value in options.items() if value is not None}
    return json.dumps(given, sort_keys=True, default=str).encode()


def _sources(root: Path) -> Iterator[bytes]:
    for path in sorted(
        [root / "__init__.py", *(file for folder in FOLDERS for file in (root / folder).rglob("*") if _is_source(root, file))]
    ):
        yield f"{path.relative_to(root).as_posix()} {_sha256(path)}".encode()


def _is_source(root: Path, file: Path) -> bool:
    return file.suffix in SOURCES and not file.is_relative_to(root / BUNDLED) and file.is_file()


def _models(*places: Path) -> Iterator[bytes]:
    for place in places:
        for file in sorted(file for file in place.rglob("*") if file.is_file()) if place.is_dir() else [place]:
            try:
                size, changed = _state(file)
            except OSError:
                size, changed = -1, -1
            yield f"{file} {size} {changed}".encode()


def _machine() -> Iterator[bytes]:
    for name in DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        yield f"{name} {version}".encode()
    yield f"{sys.version} {platform.system()} {platform.machine()}".encode()
    yield _cpu_flags().encode()


def _cpu_flags() -> str:
    """Features of the first CPU, in order; x86 and Arm have different words for them. "" where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    told = [line.partition(":")[2].split() for line in lines if line.partition(":")[0].strip() in ("flags", "Features")]
    return " ".join(sorted(told[0])) if told else ""


def _state(file: Path) -> list[int]:
    """[size, time of change in ns] of a file."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
